"""Modules and training loops as people write them: every wrapper gives the step of one device.

Truth is one process in float64 that adds the gradients of all ranks' losses and takes their mean.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtlab
from dtlab.collectives import broadcast
from dtlab.models import GPT, GPTConfig, text_batch
from dtlab.parallel import (
    LAMB,
    BatchSampler,
    DataParallel,
    Mesh,
    clip_grad_norm_,
    full_state_dict,
    hybrid,
    load_full_state_dict,
    tensor,
    zero,
)
from tests.parallel.training import difference, on, refused

WRAPPERS: dict[str, Callable[..., Any]] = {
    "overlap": lambda m, comm, **o: (DataParallel(m, comm, bucket_bytes=1), sgd(m)),
    "bucket": lambda m, comm, **o: (DataParallel(m, comm, "bucket"), sgd(m)),
    **{f"zero {stage}": lambda m, comm, stage=stage, **o: zero(
        m, comm, stage, torch.optim.SGD, lr=1.0, **o) for stage in (1, 2, 3)},
}
ZEROS = "zero 1", "zero 2", "zero 3"


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1.0)


def data(seed: int, rows: int = 4) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, dtype=torch.float64, generator=random)


class Net(nn.Module):
    """Layers in a list, a weight of its own, a frozen layer; `use` says how they are run."""

    def __init__(self, use: Callable[[Net, Tensor], Any] | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.use = use or Net.in_turn
        if use is shifted:
            self.layers[1].register_forward_pre_hook(shift)
        self.double()

    def in_turn(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.scale

    def forward(self, x: Tensor) -> Any:
        return self.use(self, x)


@dataclass
class Output:
    parts: dict[str, Any]


class Opaque:
    """Tensors that no library finds."""

    def __init__(self, y: Tensor):
        self.__y = y

    def y(self) -> Tensor:
        return self.__y


def mean(model: Any, x: Tensor) -> None:
    model(x).square().mean().backward()


def penalty_of_the_slope(model: Any, x: Tensor) -> None:
    x = x.requires_grad_()
    y = model(x)
    slope, = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.square().mean() + slope.square().mean()).backward()


def adversarial(model: Any, x: Tensor) -> None:
    x = x.requires_grad_()
    slope, = torch.autograd.grad(model(x).square().mean(), x)
    mean(model, (x + 0.1 * slope.sign()).detach())


def slope_on_one_rank(model: Any, x: Tensor) -> None:
    if getattr(model, "comm", None) is None or (model.comm.rank == 0 and "3" not in model.name):
        model.eval()  # otherwise rank 0's buffers go to all ranks
        x = x.requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        model.train()
    mean(model, x.detach())


def two_backwards(model: Any, x: Tensor) -> None:
    y = model(x)
    y.square().mean().backward(retain_graph=True)
    y.sum().backward()


def checkpointed(model: Any, x: Tensor) -> None:
    checkpoint(model, x, use_reentrant=False).square().mean().backward()


def two_forwards(model: Any, x: Tensor) -> None:
    (model(x) * model(x.flip(0))).mean().backward()


def accumulated(model: Any, x: Tensor) -> None:
    if hasattr(model, "no_sync"):
        with model.no_sync():
            mean(model, x[:1])
    else:
        mean(model, x[:1])
    mean(model, x[1:])


def without_the_wrapper(model: Any, x: Tensor) -> None:
    mean(getattr(model, "module", model), x)


def evaluated_between(model: Any, x: Tensor) -> None:
    mean(model, x)
    model.eval()
    with torch.inference_mode():
        model(x)
    model.train()


def frozen_for_a_while(model: Any, x: Tensor) -> None:
    """As a GAN's discriminator is while its generator is trained."""
    net = getattr(model, "module", model)
    for part in (net.layers[1], net):
        part.requires_grad_(False)
        mean(model, x.clone().requires_grad_())
        part.requires_grad_(True)
        net.frozen.requires_grad_(False)
    mean(model, x.flip(0))


def one_gradient_dropped(model: Any, x: Tensor) -> None:
    mean(model, x)
    getattr(model, "module", model).layers[1].weight.grad = None


def one_gradient_replaced(model: Any, x: Tensor) -> None:
    mean(model, x)
    weight = getattr(model, "module", model).layers[1].weight
    weight.grad = torch.zeros(3, 3, dtype=torch.float64)
    getattr(model, "reduce", bool)()


def an_error_first(model: Any, x: Tensor) -> None:
    y = model(x)

    def fail(_: Tensor) -> None:
        raise KeyError("mine")

    y.register_hook(fail)
    with pytest.raises(KeyError):
        y.sum().backward()
    mean(model, x)


def twice(reentrant: bool) -> Callable[[Net, Tensor], Tensor]:
    def use(net: Net, x: Tensor) -> Tensor:
        x = net.layers[2](x.requires_grad_())
        for layer in (net.layers[0], net.layers[1], net.layers[0]):
            x = checkpoint(layer, x, use_reentrant=reentrant).tanh()
        return net.scale * x
    return use


def all_reentrant(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    for layer in net.layers:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


def parts_reentrant(net: Net, x: Tensor) -> Tensor:
    """Two checkpoints within a layer of ZeRO use the same parameters."""
    def part(x: Tensor) -> Tensor:
        return (net.scale * x).sin() * net.norm.weight + net.norm.bias

    x = x.requires_grad_()
    for _ in range(2):
        x = checkpoint(part, x, use_reentrant=True)
    return x


def shifted(net: Net, x: Tensor) -> Tensor:
    return net.in_turn(x)


def shift(layer: Any, args: Any) -> Any:
    """A hook that reads the layer's weight before it runs, as those of weight_norm do."""
    return args[0] + layer.weight.mean(),


def borrowed(net: Net, x: Tensor) -> Tensor:
    """A layer's weight is used while another one runs."""
    return nn.functional.linear(net.layers[0](x), net.scale * net.scale.new_ones(3, 3))


def clamped(net: Net, x: Tensor) -> Tensor:
    """Forward writes a parameter."""
    with torch.no_grad():
        net.scale.clamp_(max=0.5)
    return net.in_turn(x)


def descending(net: Net, x: Tensor) -> Tensor:
    """Forward differentiates, and goes on with the same parameters, as energy-based models do."""
    x = x.requires_grad_()
    for _ in range(2):
        energy = (net.in_turn(x) * net.scale).sum()
        x = net.scale * x - torch.autograd.grad(energy, x, create_graph=True)[0]
    return x


USES: dict[str, tuple[Callable[[Net, Tensor], Any] | None, Callable[[Any, Tensor], None]]] = {
    "plain": (None, mean),
    "dataclass": (lambda net, x: Output({"y": [net.in_turn(x)]}),
                  lambda model, x: model(x).parts["y"][0].square().mean().backward()),
    "opaque": (lambda net, x: Opaque(net.in_turn(x)),
               lambda model, x: model(x).y().square().mean().backward()),
    "penalty of the slope": (None, penalty_of_the_slope),
    "adversarial": (None, adversarial),
    "slope on one rank": (None, slope_on_one_rank),
    "two backwards": (None, two_backwards),
    "two forwards": (None, two_forwards),
    "accumulated": (None, accumulated),
    "without the wrapper": (None, without_the_wrapper),
    "an error first": (None, an_error_first),
    "evaluated between": (None, evaluated_between),
    "frozen for a while": (None, frozen_for_a_while),
    "one gradient dropped": (None, one_gradient_dropped),
    "one gradient replaced": (None, one_gradient_replaced),
    "frozen first": (lambda net, x: net.in_turn(net.frozen(x)), mean),
    "batch norm twice": (lambda net, x: net.in_turn(net.norm(net.norm(x) * 2)), mean),
    "batch norm, two forwards": (lambda net, x: net.in_turn(net.norm(x)), two_forwards),
    "checkpointed twice": (twice(False), mean),
    "checkpointed twice, reentrant": (twice(True), mean),
    "all reentrant": (all_reentrant, mean),
    "parts reentrant": (parts_reentrant, mean),
    "borrowed": (borrowed, mean),
    "a hook that reads a weight": (shifted, mean),
    "clamped": (clamped, mean),
    "descending": (descending, mean),
    "descending, checkpointed": (descending, checkpointed),
    "skips a layer": (lambda net, x: net.layers[2](net.layers[0](x)), mean),
}


def stepped(comm: dtlab.Comm, wrapper: str, use: str) -> dict[str, Tensor]:
    forward, train = USES[use]
    model, optimizer = WRAPPERS[wrapper](Net(forward), comm)
    model.name = wrapper
    for step in range(2):
        optimizer.zero_grad()
        train(model, data(10 * step + comm.rank))
        optimizer.step()
    return {k: v for k, v in full_state_dict(model).items() if not k.startswith("norm.")}


def one_device(ranks: int, use: str) -> dict[str, Tensor]:
    forward, train = USES[use]
    net = Net(forward)
    optimizer = sgd(net)
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(ranks):
            train(net, data(10 * step + rank))
        for p in net.parameters():
            p.grad = None if p.grad is None else p.grad / ranks
        optimizer.step()
    return {k: v.detach() for k, v in net.state_dict().items() if not k.startswith("norm.")}


def assert_stepped(states: list[Any], one: Net, *xs: Tensor) -> None:
    """Each is what a step of `one` on all these samples makes."""
    mean(one, torch.cat(xs))
    sgd(one).step()
    for state in states:
        assert difference(state, one.state_dict()) < 1e-12


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_stay_until_they_are_zeroed(wrapper: str) -> None:
    """Over a second step, and a second backward."""
    def train(model: Any, optimizer: Any, batches: list[Tensor]) -> None:
        for _ in range(2):
            for x in batches:
                (model(x).square().mean() / len(batches)).backward()
            optimizer.step()
            optimizer.step()

    def trained(comm: dtlab.Comm) -> dict[str, Tensor]:
        model, optimizer = wrapped(comm, wrapper)
        train(model, optimizer, [data(comm.rank)])
        return full_state_dict(model)

    one = Net()
    train(one, sgd(one), [data(rank) for rank in range(3)])
    for state in on("simulator", trained, ranks=3).values:
        assert difference(state, {name: p.detach() for name, p in one.state_dict().items()}) < 1e-12


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_step_is_that_of_one_device(wrapper: str, use: str) -> None:
    expected = one_device(3, use)
    for state in on("simulator", stepped, wrapper, use, ranks=3).values:
        assert difference(state, expected) < 1e-12


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_reentrant_checkpoints_send_no_more(wrapper: str) -> None:
    """Each runs a backward of its own, which isn't the end of the whole one."""
    def sent(use: Callable[[Net, Tensor], Tensor] | None) -> int:
        def step(comm: dtlab.Comm) -> None:
            mean(WRAPPERS[wrapper](Net(use), comm)[0], data(comm.rank))

        return sum(m.nbytes for m in on("simulator", step, ranks=3).trace.transfers)

    assert sent(all_reentrant) == sent(lambda net, x: nn.Sequential(*net.layers)(x))


def test_processes_step_as_one_device_does() -> None:
    def all_of_them(comm: dtlab.Comm) -> dict[tuple[str, str], Any]:
        return {(wrapper, use): stepped(comm, wrapper, use) for wrapper in WRAPPERS for use in USES}

    for states in on("gloo", all_of_them, ranks=2).values:
        for (_, use), state in states.items():
            assert difference(state, one_device(2, use)) < 1e-12


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_forward_without_a_backward_ends_no_accumulation(wrapper: str) -> None:
    def counted(comm: dtlab.Comm) -> dict[str, Tensor]:
        model, optimizer = WRAPPERS[wrapper](Net(), comm)
        model(data(100))  # as one validates without torch.no_grad
        x = data(comm.rank)
        with model.no_sync():
            assert model.backward(model(x[:1]).square().mean(), 1) == 1
        assert model.backward(model(x[1:]).square().mean(), 3) == 12
        optimizer.step()
        return full_state_dict(model)

    assert_stepped(on("simulator", counted, ranks=3).values, Net(), data(0), data(1), data(2))


# ---- parameters that are not there ---------------------------------------------------------------


def wrapped(comm: dtlab.Comm, wrapper: str, **options: Any) -> tuple[Any, Any]:
    return WRAPPERS[wrapper](Net(), comm, **options)


READS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda net: net.layers[0].weight.sum(),
    "copy": lambda net: copy.deepcopy(net.layers[1]).weight,
    "double": lambda net: net.layers[1].double().weight.detach(),
    "to": lambda net: net.layers[1].to("cpu").weight.detach(),
    "state_dict": lambda net: net.state_dict()["layers.2.bias"],
    "list": lambda net: net.scale.tolist(),
    "penalty": lambda net: sum(p.square().sum() for p in net.parameters()),
    "numpy": lambda net: net.layers[0].bias.detach().numpy(),
    "averaged": lambda net: torch.optim.swa_utils.AveragedModel(net).module.scale,
    "pickle": lambda net: pickle.loads(pickle.dumps(net.layers[0].bias)),
    "saved": lambda net: pickle.loads(pickle.dumps(net.layers))[1](data(0)).detach(),
    "shallow copy": lambda net: copy.copy(net.layers[1])(data(0)).detach(),
    "jvp": lambda net: torch.func.jvp(net.layers[1], (data(0),), (data(1),))[1].detach(),
    "print": lambda net: repr(list(net.parameters())) and None,
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_reading_a_parameter_is_right_or_refused(wrapper: str, read: str) -> None:
    def values(comm: dtlab.Comm) -> Any:
        model, _ = wrapped(comm, wrapper)
        try:
            outside = READS[read](model.module)
        except dtlab.ConfigError as error:
            assert wrapper == "zero 3" and "inside `with model.gathered():`" in str(error)  # noqa: PT017, PT018
            outside = None
        with model.gathered():
            return outside, READS[read](model.module)

    expected = READS[read](Net())
    for outside, inside in on("simulator", values, ranks=3).values:
        for found in (outside, inside) if outside is not None else (inside,):
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)) if (
                expected is not None) else found is None


def test_torch_func_differentiates_a_gathered_model() -> None:
    def jacobian(comm: dtlab.Comm) -> Tensor:
        model, _ = wrapped(comm, "zero 3")
        with pytest.raises(dtlab.ConfigError, match="can't differentiate while"):
            torch.func.jacrev(model.eval())(data(0))
        with model.gathered():
            return torch.func.jacrev(model)(data(0)).detach()

    expected = torch.func.jacrev(Net().eval())(data(0)).detach()
    for found in on("simulator", jacobian, ranks=2).values:
        torch.testing.assert_close(found, expected)


def test_stage_3_in_torch_compile_runs_as_it_is() -> None:
    def step(comm: dtlab.Comm) -> Any:
        model, optimizer = wrapped(comm, "zero 3")
        mean(torch.compile(model, backend="eager"), data(comm.rank))
        torch.compile(optimizer.step, backend="eager")()
        return full_state_dict(model)

    assert_stepped(on("simulator", step, ranks=1).values, Net(), data(0))


@pytest.mark.parametrize("backend", ["simulator", "gloo"])
def test_a_default_device_is_not_that_of_what_the_package_makes_itself(backend: str) -> None:
    """As after torch.set_default_device("cuda"), where a model and its batches are on the CPU."""
    def trained(comm: dtlab.Comm, device: str) -> tuple[Tensor, ...]:
        tokens, large = torch.arange(8).view(2, 4), torch.ones(3 << 18)
        biases = []
        with torch.device(device):
            for axis in "pp", "tp":
                gpt = GPT(GPTConfig(layers=2, hidden=8, heads=2, vocab=12, context=4), device="cpu")
                model, optimizer = hybrid(gpt, Mesh(comm, **{axis: 2}), optimizer=LAMB, lr=0.1)
                model.backward(tokens, tokens)
                optimizer.step()
                biases.append(full_state_dict(model)["norm.bias"])
            batches = torch.tensor([*BatchSampler(8, 4, comm)], device="cpu")
            broadcast(comm, large)
            return *biases, batches, *text_batch(0, 2, 4)

    expected = on("simulator", trained, "cpu", ranks=2).values
    torch.testing.assert_close(on(backend, trained, "meta", ranks=2).values, expected)
    with torch.device("meta"):
        x = torch.ones(2, device="cpu")
        assert all(map(x.equal, on(backend, lambda comm, x: x, x, ranks=2).values))


@pytest.mark.parametrize("wrapper", ["zero 1", "zero 2"])
def test_a_layer_is_compiled_anew_while_there_are_gradients(wrapper: str) -> None:
    def step(comm: dtlab.Comm) -> Any:
        model, optimizer = wrapped(comm, wrapper)
        layer = torch.compile(model.module.layers[0], backend="eager")
        model.module.use = lambda net, x: net.in_turn(layer(x))
        mean(model, data(comm.rank))
        with torch.no_grad():
            model(data(2, rows=5))
        optimizer.step()
        return full_state_dict(model)

    one = Net(lambda net, x: net.in_turn(net.layers[0](x)))
    assert_stepped(on("simulator", step, ranks=2).values, one, data(0), data(1))


def other_state() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {k: torch.randn_like(v) if v.is_floating_point() else v
            for k, v in Net().state_dict().items()}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("wrapper", ZEROS)
def test_what_is_written_stays(wrapper: str, dtype: torch.dtype | None) -> None:
    """By load_state_dict, in place within `gathered`, and through `.data`."""
    def written(comm: dtlab.Comm) -> Any:
        model, optimizer = wrapped(comm, wrapper, param_dtype=dtype)
        other = other_state()
        model.module.load_state_dict(other)
        with model.gathered(), torch.no_grad():
            model.module.scale.fill_(4.0)
            model.module.layers[1].bias.data.mul_(2.0)
        other["scale"], other["layers.1.bias"] = torch.tensor(4.0), 2 * other["layers.1.bias"]
        before = full_state_dict(model)
        model.backward(model(data(comm.rank).to(dtype)).sum() * 0, 4)
        optimizer.step()
        return before, full_state_dict(model), other

    for before, after, other in on("simulator", written, ranks=3).values:
        for state in (before, after):
            for key, value in other.items():
                if not key.startswith("norm."):
                    torch.testing.assert_close(state[key].double(), value.double(),
                                               rtol=0.01 if dtype else 0, atol=0)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_one_devices_state_dict_is_loaded(wrapper: str) -> None:
    def loaded(comm: dtlab.Comm) -> Any:
        model, _ = wrapped(comm, wrapper)
        other = other_state()
        load_full_state_dict(model, other)
        for wrong, says in (({"scale": other["scale"]}, "there is no '.*weight'"),
                            ({**other, "more": other["scale"]}, "it has 'more' of shape"),
                            ({**other, "scale": torch.ones(2)}, r"'scale' has shape \(2,\)")):
            with pytest.raises(dtlab.ConfigError, match=says):
                load_full_state_dict(model, wrong)
        return full_state_dict(model), other

    for state, other in on("simulator", loaded, ranks=3).values:
        assert difference(state, other) == 0


@pytest.mark.parametrize("wrapper", ZEROS)
def test_what_is_kept_from_gathered_stays_valid(wrapper: str) -> None:
    def kept(comm: dtlab.Comm) -> Any:
        model, optimizer = wrapped(comm, wrapper)
        with model.gathered():
            state = model.module.state_dict()
            norm = sum(p.square().sum() for p in model.module.parameters())
        (model(data(comm.rank)).square().mean() + norm).backward()
        optimizer.step()
        return state, full_state_dict(model)

    one = Net()
    norm = sum(p.square().sum() for p in one.parameters())
    (sum(one(data(rank)).square().mean() for rank in range(2)) / 2 + norm).backward()
    for state, after in on("simulator", kept, ranks=2).values:
        if wrapper == "zero 3":  # a snapshot, as the units are freed
            assert difference({k: v for k, v in state.items() if "norm" not in k},
                              {k: v for k, v in Net().state_dict().items() if "norm" not in k}) == 0
        for name, p in one.named_parameters():
            moved = p.detach() - (p.grad if p.grad is not None else 0)
            torch.testing.assert_close(after[name], moved)


@pytest.mark.parametrize("wrapper", ZEROS)
def test_gradients_are_this_ranks_parts(wrapper: str) -> None:
    def parts(comm: dtlab.Comm) -> Any:
        model, _ = wrapped(comm, wrapper)
        mean(model, data(comm.rank))
        named = dict(model.named_gradients())
        found = {name: p.grad for name, p in model.module.named_parameters() if p.requires_grad}
        assert {name for name, part in found.items() if part is not None and part.numel()} == (
            set(named))
        with pytest.raises(dtlab.ConfigError, match="clip_grad_norm_"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for p in model.parameters():
            if p.grad is not None and p.dim() > 1:
                for use in (lambda g: g.square().sum(), lambda g: g.mean(1),
                            lambda g: g.numpy(), lambda g: g.tolist(),
                            lambda g, shape=p.shape: g.view(shape)):
                    with pytest.raises(dtlab.ConfigError, match="isn't that of the whole"):
                        use(p.grad)
        before = {name: part.clone() for name, part in named.items()}
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= 2
        assert all(torch.equal(part, 2 * before[name]) for name, part in model.named_gradients())
        return before

    one = Net()
    (sum(one(data(rank)).square().mean() for rank in range(3)) / 3).backward()
    ranks = on("simulator", parts, ranks=3).values
    for name, p in one.named_parameters():
        if p.requires_grad and p.grad is not None:
            joined = torch.cat([part[name] for part in ranks if name in part])
            torch.testing.assert_close(joined, p.grad.flatten())


@pytest.mark.parametrize("options", [{}, {"param_dtype": torch.float32}, {"offload": True}])
@pytest.mark.parametrize("wrapper", ZEROS)
def test_gradients_of_what_the_optimizer_steps_are_those_parts(
        wrapper: str, options: dict[str, Any]) -> None:
    """As libraries clip, scale and forget gradients, which know the optimizer alone."""
    def train(optimizer: Any, backward: Callable[[int], None]) -> None:
        for step in range(3):
            held = [p for group in optimizer.param_groups for p in group["params"]]
            for p in held:
                p.grad = None
            backward(step)
            nn.utils.clip_grad_value_(held, 0.02)
            for p in held:
                if p.grad is not None:
                    p.grad = p.grad * 0.5
            optimizer.step()

    def ranks(comm: dtlab.Comm) -> Any:
        model, optimizer = wrapped(comm, wrapper, **options)
        dtype = options.get("param_dtype", torch.float64)
        train(optimizer, lambda step: mean(model, data(2 * step + comm.rank).to(dtype)))
        with pytest.raises(dtlab.ConfigError, match="clip_grad_norm_"):
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        return full_state_dict(model)

    one = Net()
    train(sgd(one), lambda step: mean(one, torch.cat([data(2 * step), data(2 * step + 1)])))
    for state in on("simulator", ranks, ranks=2).values:
        assert difference(state, one.state_dict()) < (1e-5 if "param_dtype" in options else 1e-12)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_rank_whose_loss_is_the_mean_of_nothing_adds_nothing(wrapper: str) -> None:
    def step(comm: dtlab.Comm) -> Any:
        model, optimizer = WRAPPERS[wrapper](Net(), comm)
        counts = torch.zeros(4) if comm.rank else torch.ones(4)
        loss = (model(data(comm.rank)).mean(-1) * counts).sum() / counts.sum()
        assert model.backward(loss, int(counts.sum())) == 4
        optimizer.step()
        return full_state_dict(model)

    one = Net()
    one(data(0)).mean().backward()
    sgd(one).step()
    for state in on("simulator", step, ranks=2).values:
        assert difference(state, one.state_dict()) < 1e-12


def dropped(model: Any, step: int, rank: int) -> None:
    """Backward that raises, or micro-batches whose gradients are thrown away."""
    if step % 2:
        with model.no_sync():
            model.backward(model(data(rank)).mean(), 4)
        return

    def fail(_: Tensor) -> None:
        raise ArithmeticError

    hook = model.module.layers[1].register_forward_hook(lambda *what: (
        None, what[2].register_hook(fail))[0])
    with pytest.raises(ArithmeticError):
        model.backward(model(data(rank)).mean(), 4) if step else model(data(rank)).mean().backward()
    hook.remove()


@pytest.mark.parametrize("backend", ["simulator", "gloo"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_step_that_failed_or_was_dropped_leaves_nothing(wrapper: str, backend: str) -> None:
    def train(comm: dtlab.Comm) -> Any:
        model, optimizer = WRAPPERS[wrapper](Net(), comm)
        for step in range(3):
            dropped(model, step, comm.rank)
            optimizer.zero_grad()
            model.backward(model(data(2 * step + comm.rank)).square().mean(), 4)
            optimizer.step()
            optimizer.zero_grad()
        return full_state_dict(model)

    one = Net()
    stepper = sgd(one)
    for step in range(3):
        stepper.zero_grad()
        one(torch.cat([data(2 * step), data(2 * step + 1)])).square().mean().backward()
        stepper.step()
    for state in on(backend, train, ranks=2).values:
        assert difference(state, one.state_dict()) < 1e-12


def test_a_module_is_wrapped_anew_when_a_layer_is_unfrozen() -> None:
    def use(net: Net, x: Tensor) -> Any:
        return net.frozen(net.in_turn(x))

    def step(comm: dtlab.Comm) -> Any:
        model, _ = WRAPPERS["overlap"](Net(use), comm)
        model.module.frozen.requires_grad_(True)
        model, optimizer = WRAPPERS["overlap"](model.module, comm)
        model(data(comm.rank)).square().mean().backward()
        optimizer.step()
        return full_state_dict(model)

    one = Net(use)
    one.frozen.requires_grad_(True)
    assert_stepped(on("simulator", step, ranks=2).values, one, data(0), data(1))


def hooked(comm: dtlab.Comm, wrapper: str) -> None:
    model, _ = wrapped(comm, wrapper)
    own = torch.optim.SGD([model.module.scale])
    model.module.scale.register_post_accumulate_grad_hook(lambda p: own.step())
    mean(model, data(comm.rank))


def unfrozen(comm: dtlab.Comm, wrapper: str) -> None:
    model, _ = wrapped(comm, wrapper)
    model.module.frozen.requires_grad_(True)
    mean(model.module, data(comm.rank))


def unreduced(comm: dtlab.Comm, wrapper: str) -> None:
    model, optimizer = wrapped(comm, wrapper)
    with model.no_sync():
        mean(model, data(comm.rank))
    optimizer.step()


def counted_by_one_of_two(comm: dtlab.Comm) -> None:
    first, second = (DataParallel(nn.Linear(3, 3).double(), comm) for _ in range(2))
    first.backward(second(first(data(comm.rank))).mean(), 4 + comm.rank)


def tied_by_data(comm: dtlab.Comm, of: Callable[[Tensor], Tensor]) -> None:
    net = Net()
    net.layers[2].weight.data = of(net.layers[0].weight.data)
    WRAPPERS["overlap"](net, comm)  # which leaves both where they are
    net = Net()
    net.layers[2].weight.data = of(net.layers[0].weight.data)
    zero(net, comm)


def compiled_afterwards(comm: dtlab.Comm) -> None:
    model, _ = zero(nn.Sequential(nn.Linear(3, 3)), comm, 3)
    model.module.compile(backend="eager")
    model(torch.ones(2, 3))


def hidden_by_a_checkpoint(comm: dtlab.Comm) -> None:
    first, second = (DataParallel(nn.Linear(3, 3).double(), comm) for _ in range(2))
    loss = checkpoint(second, first(data(comm.rank)), use_reentrant=True).mean()
    first.backward(loss, 4 + comm.rank)


def state_of_rank_0(comm: dtlab.Comm) -> None:
    """Rank 1's pieces have the same shapes, but are others."""
    model, optimizer = zero(nn.Linear(3, 2, bias=False).double(), comm)
    mean(model, data(comm.rank))
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.load_state_dict(copy.deepcopy(state))
    optimizer.load_state_dict(comm._all_gather_objects(state)[0])


def changed_in_place(net: Net, x: Tensor) -> Tensor:
    y = net.layers[0](x).exp()
    z = y.sin()
    y += 1
    return z + y


MISTAKES: dict[str, tuple[str, Callable[[dtlab.Comm], Any]]] = {
    "an optimizer in backward": ("step the optimizer after backward", lambda comm: (
        hooked(comm, "bucket"))),
    "unfrozen after wrapping": ("before wrapping", lambda comm: unfrozen(comm, "overlap")),
    "an expanded buffer": ("elements of 'rows' share memory", lambda comm: (lambda net: (
        net.register_buffer("rows", torch.ones(1).expand(3)), DataParallel(net, comm)))(Net())),
    "tied by .data": ("'layers.0.weight' and 'layers.2.weight' lie in the same memory",
                      lambda comm: tied_by_data(comm, lambda w: w)),
    "transposed": ("lie in the same memory", lambda comm: tied_by_data(comm, Tensor.t)),
    "wrapped before": ("wrap each module once", lambda comm: (
        zero(DataParallel(Net(), comm), comm, 2))),
    "a step of gradients that are not reduced": ("outside no_sync", lambda comm: (
        unreduced(comm, "zero 2"))),
    "changed in place after use": ("changed in place", lambda comm: (
        mean(zero(Net(changed_in_place), comm, 3)[0], data(comm.rank)))),
    "no samples with ZeRO 3": ("on an empty batch", lambda comm: (
        wrapped(comm, "zero 3")[0].backward(None, 0))),
    "an optimizer of the module's parameters": ("step the optimizer that zero", lambda comm: (
        torch.optim.Adam(wrapped(comm, "zero 2")[0].parameters()).step())),
    "a model of parameters converted": ("convert or replace parameters before", lambda comm: (
        lambda model: (model.module.float().double(), model(data(0))))(wrapped(comm, "zero 1")[0])),
    "a model in another dtype": ("convert or replace them before wrapping", lambda comm: (
        lambda model: (model.module.float(), model(data(0))))(wrapped(comm, "overlap")[0])),
    "a pickled tensor-parallel layer": ("such as its state_dict", lambda comm: (
        pickle.dumps(tensor.ColumnLinear(comm, 4, 4)))),
    "a pickled wrapper": ("save its full_state_dict", lambda comm: (
        pickle.dumps(wrapped(comm, "overlap")[0]))),
    "a copy of the wrapper": ("copy its .module", lambda comm: (
        torch.optim.swa_utils.AveragedModel(wrapped(comm, "overlap")[0]))),
    "without sizes": ("call the module once before", lambda comm: (
        zero(nn.Sequential(nn.LazyLinear(2)), comm))),
    "an embedding that shrinks": ("shrink rows after optimizer.step()", lambda comm: (
        DataParallel(nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)), comm))),
    "gradients by frequency": ("leave scale_grad_by_freq out", lambda comm: (
        DataParallel(nn.Sequential(nn.Embedding(5, 3, scale_grad_by_freq=True)), comm))),
    "nothing to train": ("trains no parameter", lambda comm: (
        DataParallel(nn.Linear(2, 2).requires_grad_(False), comm))),
    "nothing to shard": ("trains no parameter", lambda comm: (
        zero(nn.Linear(2, 2).requires_grad_(False), comm))),
    "float inputs": ("convert its inputs with x.to", lambda comm: (
        wrapped(comm, "zero 1", param_dtype=torch.bfloat16)[0](torch.ones(2, 3)))),
    "two models, one counts": ("wrap both together", counted_by_one_of_two),
    "a compiled layer": ("torch.compile traces the parameters of '0'", lambda comm: (
        zero(nn.Sequential(torch.compile(nn.Linear(3, 3), backend="eager")), comm, 3)[0](
            torch.ones(2, 3)))),
    "compiled afterwards": ("traces the parameters of 'the module'", compiled_afterwards),
    "a checkpoint hides one": ("wrap both together", hidden_by_a_checkpoint),
    "another rank's optimizer state": ("save and load the optimizer with", state_of_rank_0),
    "one device's optimizer state": ("or of whole parameters", lambda comm: (
        zero(nn.Linear(3, 1), comm)[1].load_state_dict(sgd(nn.Linear(3, 1)).state_dict()))),
    "sparse gradients": ("make embeddings with sparse=False", lambda comm: (
        zero(nn.Embedding(5, 3, sparse=True), comm, 2)[0](torch.tensor([1])).sum().backward())),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake: str) -> None:
    says, fn = MISTAKES[mistake]
    assert says in refused(fn)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_copy_is_a_model_of_its_own(wrapper: str) -> None:
    """As a target network, or the weights' average, which may be trained and wrapped, too."""
    def trained(comm: dtlab.Comm) -> dict[str, Tensor]:
        model, _ = wrapped(comm, wrapper)
        with model.gathered():
            net = copy.deepcopy(model.module)
        one, optimizer = WRAPPERS[wrapper](net, comm)
        mean(one, data(comm.rank))
        optimizer.step()
        with one.gathered():
            last = copy.deepcopy(net)
        sgd(last).step()
        return last.state_dict()

    assert_stepped(on("simulator", trained, ranks=2).values, Net(), data(0), data(1))


# ---- pairs by identity, numbers at the edge ------------------------------------------------------


@pytest.mark.parametrize("backend", ["simulator", "gloo"])
def test_layers_of_one_size_do_not_meet(backend: str) -> None:
    def step(comm: dtlab.Comm) -> None:
        model, _ = zero(Net(lambda net, x: net.layers[comm.rank](x)), comm, 3)
        mean(model, data(comm.rank))

    with pytest.raises(dtlab.errors.DtlabError, match=r"layers\.\d\.weight and 1 more: all_gather"
                       r".*but rank \d is in layers\.\d\.weight and 1 more: all_gather"):
        on(backend, step, ranks=2)


def test_layers_that_one_rank_skips_are_named() -> None:
    def step(comm: dtlab.Comm) -> None:
        used = range(2 * comm.rank, 3)
        model, _ = zero(Net(lambda net, x: sum(net.layers[i](x) for i in used)), comm, 3)
        mean(model, data(comm.rank))

    with pytest.raises(dtlab.errors.DtlabError, match=r"layers\.\d\.weight and 1 more: all_gather"):
        on("simulator", step, ranks=2)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(3, 2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.w).abs().square()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_complex_parameters_train_and_are_clipped(wrapper: str) -> None:
    def train(model: Any, optimizer: Any, rows: list[Tensor], clip: Callable[..., Any]) -> Any:
        norms = []
        for _ in range(3):
            optimizer.zero_grad()
            (sum(model(x).mean() for x in rows) / len(rows)).backward()
            norms.append(float(clip()))
            optimizer.step()
        return norms

    def ranks(comm: dtlab.Comm) -> Any:
        model, optimizer = WRAPPERS[wrapper](Complex(), comm)
        norms = train(model, optimizer, [data(comm.rank)], lambda: clip_grad_norm_(model, 0.1))
        return norms, full_state_dict(model)["w"]

    one = Complex()
    expected = train(one, sgd(one), [data(rank) for rank in range(3)],
                     lambda: nn.utils.clip_grad_norm_(one.parameters(), 0.1))
    for norms, w in on("simulator", ranks, ranks=3).values:
        assert norms == pytest.approx(expected, rel=1e-9)
        torch.testing.assert_close(w, one.w.detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_half_precision_overflows_no_sooner_than_torchs(wrapper: str, dtype: torch.dtype) -> None:
    large = torch.finfo(dtype).max / 2

    def ranks(comm: dtlab.Comm) -> Any:
        net = nn.Linear(1, 1, bias=False).to(dtype)
        nn.init.zeros_(net.weight)
        model, optimizer = WRAPPERS[wrapper](net, comm)
        (model(torch.ones(1, 1, dtype=dtype)) * large).sum().backward()
        optimizer.step()
        return full_state_dict(model)["weight"].item()

    for moved in on("simulator", ranks, ranks=4).values:
        assert moved == pytest.approx(-large, rel=0.01)


def test_a_gradient_that_underflows_is_a_gradient() -> None:
    def ranks(comm: dtlab.Comm) -> Any:
        net = nn.Linear(1, 1, bias=False).double()
        model = DataParallel(net, comm, reduce_dtype=torch.float16)
        (model(torch.ones(1, 1, dtype=torch.float64)) * -1e-300).sum().backward()
        return net.weight.grad

    for gradient in on("simulator", ranks, ranks=2).values:
        assert gradient is not None
        assert gradient.item() == 0


def no_decay(name: str) -> dict[str, float]:
    return {"weight_decay": 0.0} if name.endswith("bias") or name == "scale" else {}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameter_groups_by_name(stage: int) -> None:
    def trained(comm: dtlab.Comm) -> Any:
        model, optimizer = zero(Net(), comm, stage, groups=no_decay, lr=0.1, weight_decay=0.5)
        assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.5]
        mean(model, data(comm.rank))
        optimizer.step()
        return full_state_dict(model)

    one = Net()
    decayed, plain = [], []
    for name, p in one.named_parameters():
        if p.requires_grad:
            (plain if no_decay(name) else decayed).append(p)
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}],
                                  lr=0.1, weight_decay=0.5)
    (sum(one(data(rank)).square().mean() for rank in range(3)) / 3).backward()
    optimizer.step()
    for state in on("simulator", trained, ranks=3).values:
        assert difference(state, one.state_dict()) < 1e-12


@pytest.mark.parametrize(("backend", "to_none"), [
    ("simulator", True), ("simulator", False), ("gloo", True)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_layer_without_a_gradient_does_not_move(stage: int, backend: str, to_none: bool) -> None:
    """Neither by momentum nor by decay, but with a gradient of zeros, as set_to_none=False leaves
    it, by both; one that some ranks use has the mean over all."""
    used = [{(0, 1)}, {(0, 2)}, {(1,)}, {(0, 1, 3), (0, 1)}, {(0,)}]  # by step, by rank

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)]).double()

        def forward(self, x: Tensor, numbers: tuple[int, ...]) -> Tensor:
            for number in numbers:
                x = self.layers[number](x).tanh()
            return x

    def loss(model: Any, step: int, rank: int) -> Tensor:
        numbers = sorted(used[step])[rank % len(used[step])]
        return model(data(2 * step + rank), numbers).square().mean()

    def trained(comm: dtlab.Comm) -> Any:
        heads = Heads()
        together = [heads] if stage == 3 else None  # or all ranks must call each layer
        model, optimizer = zero(heads, comm, stage, layers=together, lr=0.1, weight_decay=0.1)
        for step in range(len(used)):
            for _ in range(2):  # micro-batches
                with model.no_sync():
                    loss(model, step, comm.rank).backward()
            model.reduce()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        return full_state_dict(model)

    one = Heads()
    optimizer = torch.optim.AdamW(one.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(len(used)):
        sum(loss(one, step, rank) for rank in range(2)).backward()  # twice a half  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    for state in on(backend, trained, ranks=2).values:
        assert difference(state, one.state_dict()) < 1e-12


@pytest.mark.parametrize("wrapper", ["overlap", "zero 1", "zero 2", "zero 3"])
def test_without_samples_on_any_rank_nothing_moves(wrapper: str) -> None:
    """Nor do samples count in what began without: ranks are told to drop it."""
    def trained(comm: dtlab.Comm) -> Any:
        model, optimizer = WRAPPERS[wrapper](Net(), comm)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.1
        model(data(comm.rank)).square().mean().backward()
        optimizer.step()
        model.zero_grad()
        before = full_state_dict(model)
        optimizer.step()  # without the gradients of the step before
        assert model.backward(model(data(comm.rank)).square().mean(), 0) == 0
        optimizer.step()
        model.zero_grad()
        with model.no_sync():
            model(data(comm.rank)).square().mean().backward()
        with pytest.raises(dtlab.ConfigError, match="gradients are left"):
            model.backward(model(data(comm.rank)).square().mean(), 4)
        return before, full_state_dict(model)

    for before, after in on("simulator", trained, ranks=2).values:
        assert all(torch.equal(after[name], x) for name, x in before.items() if "norm" not in name)
