"""Pipelines as people write them: what stages hand on, what counts in a mean, and evaluation.

Truth is the same layers in a row on one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import dtlab
from dtlab.parallel import DataParallel, Mesh, clip_grad_norm_, hybrid, pipeline, zero
from tests.parallel.training import on, refused

SCHEDULES: dict[str, Callable[[int, int], pipeline.Schedule]] = {
    "1F1B": pipeline.one_f_one_b, "ZB-H1": pipeline.zb_h1, "ZB-V": pipeline.zb_v,
    "interleaved": lambda p, m: pipeline.interleaved(p, m, 2)}


class Layer(nn.Module):
    """A linear layer that takes and returns what `use` says."""

    def __init__(self, number: int, use: Callable[[Layer, Any], Any] | None = None):
        super().__init__()
        torch.manual_seed(number)
        self.linear, self.number, self.use = nn.Linear(4, 4).double(), number, use

    def forward(self, x: Any) -> Any:
        return self.use(self, x) if self.use else self.linear(x).tanh()


def as_dict(layer: Layer, x: Any) -> Any:
    """Between layers: a dict of a tensor, a list of two, and whole numbers."""
    if layer.number:
        assert torch.equal(x["rows"], torch.arange(len(x["h"])))
        h = x["h"] + x["more"][0] * x["more"][1]
    else:
        h = x
    h = layer.linear(h).tanh()
    if layer.number == 7:
        return h
    return {"h": h, "more": [h.sin(), h[:, :1]], "rows": torch.arange(len(h))}


def frozen_below(count: int) -> Callable[[Layer, Any], Any]:
    def use(layer: Layer, x: Any) -> Any:
        layer.linear.requires_grad_(layer.number >= count)
        return layer.linear(x).tanh()
    return use


def frozen_above(layer: Layer, x: Any) -> Any:
    layer.linear.requires_grad_(layer.number < 4)
    return layer.linear(x).tanh()


def in_place(layer: Layer, x: Any) -> Any:
    """As ResNets do, whose layers begin with nn.ReLU(inplace=True)."""
    return layer.linear(x.mul_(2) if layer.number else x)


def one_tensor_twice(layer: Layer, x: Any) -> Any:
    """The next layer changes it in place, and reads it by its other name."""
    h = layer.linear(x[1] + x[0].mul_(2) if layer.number else x)
    return h if layer.number == 7 else (h, h)


def inputs_in_place(layer: Layer, x: Any) -> Any:
    """The first layer changes the batch, and needs in backward what it has made of it."""
    return layer.linear(x) if layer.number else x.tanh_() * layer.linear.weight[0]


def layers(use: Any = None) -> list[Layer]:
    return [Layer(number, use) for number in range(8)]


def data(seed: int, rows: int = 8) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, dtype=torch.float64, generator=random)


def gradients(made: list[Layer]) -> dict[str, Tensor | None]:
    return {f"{layer.number}.{name}": p.grad
            for layer in made for name, p in layer.named_parameters()}


def pipe_of(comm: dtlab.Comm, schedule: str, made: list[Layer], wrap: Any = None,
            tied: dict[str, Tensor] | None = None, **options: Any
            ) -> tuple[pipeline.Pipeline, list[Layer]]:
    """A pipeline of these layers over two ranks, and the layers of this one."""
    plan = SCHEDULES[schedule](2, 4)
    stages = pipeline.cut(made, plan.stages)
    mine: list[Any] = [stages[number] for number in plan.stages_of(comm.rank)]
    own = {p for stage in mine for p in stage.parameters()}
    pipe = pipeline.Pipeline(
        [wrap(stage) for stage in mine] if wrap else mine, plan, comm,
        tied={name: p for name, p in (tied or {}).items() if p in own}, **options)
    return pipe, [layer for stage in mine for layer in stage]


def pipelined(comm: dtlab.Comm, schedule: str, use: Any, batches: list[tuple[Tensor, Tensor]],
              loss_fn: Any, wrap: Any = None, recompute: bool = False) -> Any:
    """Losses of some steps, and this rank's gradients; `wrap` stages for the ranks of dp."""
    mesh = Mesh(comm, pp=2, dp=comm.size // 2)
    dp = mesh["dp"]
    pipe, mine = pipe_of(mesh["pp"], schedule, layers(use), wrap and (lambda each: wrap(each, dp)),
                         recompute=recompute)
    losses = []
    for x, y in batches:
        rows = slice(dp.rank * len(x) // dp.size, (dp.rank + 1) * len(x) // dp.size)
        losses.append(float(pipe.step(x[rows].clone(), y[rows], loss_fn)))
    return losses, gradients(mine)


def one_device(use: Any, batches: list[tuple[Tensor, Tensor]], loss_fn: Any) -> Any:
    made = layers(use)
    losses = []
    for x, y in batches:
        loss = loss_fn(nn.Sequential(*made)(x.clone()), y)
        loss.backward()
        losses.append(float(loss))
    return losses, gradients(made)


def assert_equal(found: list[Any], expected: Any) -> None:
    for losses, mine in found:
        assert losses == pytest.approx(expected[0], rel=1e-12, nan_ok=True)
        for name, gradient in mine.items():
            if expected[1][name] is None:
                assert gradient is None, name
            else:
                torch.testing.assert_close(gradient, expected[1][name], rtol=1e-9, atol=1e-12)


PADDED = torch.tensor([0, 1, -100, 2, -100, -100, 3, 0])
BATCHES: dict[str, tuple[Any, list[tuple[Tensor, Tensor]], Any]] = {
    "a dict between stages": (as_dict, [(data(0), data(1))], mse_loss),
    "inputs changed in place": (in_place, [(data(0), data(1))], mse_loss),
    "one tensor twice": (one_tensor_twice, [(data(0), data(1))], mse_loss),
    "the batch changed in place": (inputs_in_place, [(data(0), data(1))], mse_loss),
    "shapes that change": (None, [(data(0), data(1)), (data(2, 4), data(3, 4)),
                                  (data(4, 12), data(5, 12))], mse_loss),
    "two frozen layers": (frozen_below(2), [(data(0), data(1))], mse_loss),
    "a frozen half": (frozen_below(4), [(data(0), data(1))], mse_loss),
    "the other half frozen": (frozen_above, [(data(0), data(1))], mse_loss),
    "uneven padding": (None, [(data(0), PADDED)], cross_entropy),
    "all padding in two": (None, [(data(0), PADDED.sort(descending=True)[0])], cross_entropy),
    "bytes, of which 156 is no -100": (None, [(data(0), (PADDED % 4 * 52).to(torch.uint8))],
                                       lambda y, t: cross_entropy(y, t.long() // 52)),
    "smoothed": (None, [(data(0), PADDED)],
                 lambda y, t: cross_entropy(y, t, label_smoothing=0.1)),
    "sorted the other way": (None, [(data(0), PADDED.sort()[0])], cross_entropy),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("recompute", [False, True])
def test_steps_are_those_of_one_device(schedule: str, case: str, recompute: bool) -> None:
    use, batches, loss_fn = BATCHES[case]
    found = on("simulator", pipelined, schedule, use, batches, loss_fn, None, recompute, ranks=2)
    assert_equal(found.values, one_device(use, batches, loss_fn))


def test_processes_step_as_one_device_does() -> None:
    def all_of_them(comm: dtlab.Comm) -> Any:
        return {(schedule, case): pipelined(comm, schedule, *BATCHES[case])
                for schedule in SCHEDULES for case in BATCHES}

    ranks = on("gloo", all_of_them, ranks=2).values
    for schedule in SCHEDULES:
        for case, what in BATCHES.items():
            assert_equal([found[schedule, case] for found in ranks], one_device(*what))


@pytest.mark.parametrize("wrap", [
    DataParallel, lambda stage, comm: DataParallel(stage, comm, "bucket"),
    lambda stage, comm: zero(stage, comm, 1)[0]], ids=["overlap", "bucket", "zero 1"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_wrapped_stages_reduce_once_a_step(schedule: str, wrap: Any) -> None:
    batch = [(data(0, 16), data(1, 16))]
    result = on("simulator", pipelined, schedule, None, batch, mse_loss, wrap, ranks=4)
    expected = one_device(None, batch, mse_loss)[1]
    for rank, (_, mine) in enumerate(result.values):
        for name, gradient in mine.items():
            if gradient is not None:
                part = expected[name]
                if gradient.shape != part.shape:  # a part of it: rank % 2 is the one of dp
                    part = part.flatten()
                    part = part[: len(gradient)] if rank % 2 == 0 else part[-len(gradient) :]
                torch.testing.assert_close(gradient.as_subclass(Tensor), part)


@pytest.mark.parametrize("wrap", [None, DataParallel, lambda stage, comm: zero(stage, comm, 2)[0]],
                         ids=["alone", "data", "zero 2"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_clipping_takes_the_norm_over_all_stages(schedule: str, wrap: Any) -> None:
    """And counts a tied parameter once; ZeRO refuses one that two stages of a rank share."""
    def tied_layers() -> list[Layer]:
        made = layers()
        if schedule != "ZB-V" or wrap in (None, DataParallel):
            made[6].linear.weight = made[0].linear.weight
        return made

    def clip(comm: dtlab.Comm) -> Any:
        mesh, made = Mesh(comm, pp=2, dp=2), tied_layers()
        pipe, mine = pipe_of(mesh["pp"], schedule, made, wrap and (
            lambda stage: wrap(stage, mesh["dp"])), {"weight": made[0].linear.weight})
        pipe.step(data(0), data(1), mse_loss)
        return float(clip_grad_norm_(pipe, 0.01)), gradients(mine)

    one = tied_layers()
    mse_loss(nn.Sequential(*one)(data(0)), data(1)).backward()
    norm = float(nn.utils.clip_grad_norm_(nn.Sequential(*one).parameters(), 0.01))
    expected = gradients(one)
    for found, mine in on("simulator", clip, ranks=4).values:
        assert found == pytest.approx(norm, rel=1e-9)
        for name, gradient in mine.items():
            if gradient is not None and gradient.shape == expected[name].shape:
                torch.testing.assert_close(gradient.as_subclass(Tensor), expected[name])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_evaluation_hands_outputs_back_and_sends_no_gradients(schedule: str) -> None:
    def evaluate(comm: dtlab.Comm) -> Any:
        pipe, mine = pipe_of(comm, schedule, layers())
        with torch.no_grad():
            loss = pipe.step(data(0), data(1), mse_loss)
        outputs = pipe.evaluate(data(0))
        assert all(gradient is None for gradient in gradients(mine).values())
        assert (outputs is not None) == (mine[-1].number == 7)
        return float(loss), outputs

    expected = nn.Sequential(*layers())(data(0)).detach()
    for loss, outputs in on("simulator", evaluate, ranks=2).values:
        assert loss == pytest.approx(float(mse_loss(expected, data(1))))
        if outputs is not None:
            torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize(("last", "says"), [
    ({"loss": None}, ""), ({"loss": torch.ones(())}, "the last stage returns tensor(1.)"),
    ({"loss": 3}, "the last stage returns 3, which has none")])
def test_evaluation_joins_what_has_a_batch(last: dict[str, Any], says: str) -> None:
    """And extras may be None, also with recompute."""
    class Last(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
            return {"y": super().forward(x), **last}

    def evaluate(comm: dtlab.Comm) -> Any:
        torch.manual_seed(0)
        stage = (nn.Identity(), Last(4, 4).double())[comm.rank]
        pipe = pipeline.Pipeline(stage, pipeline.gpipe(2, 4), comm, recompute=True)
        pipe.step(data(0), data(1), lambda y, t: mse_loss(y["y"], t), *[None] * comm.rank)
        return pipe.evaluate(data(0)), stage

    if says:
        assert says in refused(evaluate)
    else:
        _, (outputs, stage) = on("simulator", evaluate, ranks=2).values
        assert outputs["loss"] is None
        torch.testing.assert_close(outputs, stage(data(0)))


def changes_form(layer: Layer, x: Tensor) -> Any:
    y = layer.linear(x)
    return y if layer.number != 3 or x.sum() > 0 else (y, y)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_of_two_steps_add_up_also_of_tied_parameters(schedule: str, frozen: bool) -> None:
    """If they are frozen, or nobody uses them, there are none: weight decay would move them."""
    def tied_layers() -> list[Layer]:
        made = layers()
        made[6].linear.weight = made[0].linear.weight.requires_grad_(not frozen)
        made[6].spare = made[0].spare = nn.Parameter(torch.ones(2))
        return made

    def steps(comm: dtlab.Comm) -> Any:
        made = tied_layers()
        pipe, mine = pipe_of(comm, schedule, made, tied={"weight": made[0].linear.weight,
                                                         "spare": made[0].spare})
        for seed in (0, 2):
            pipe.step(data(seed), data(seed + 1), mse_loss)
        return gradients(mine)

    one = tied_layers()
    for seed in (0, 2):
        mse_loss(nn.Sequential(*one)(data(seed)), data(seed + 1)).backward()
    expected = gradients(one)
    assert_equal([([], mine) for mine in on("simulator", steps, ranks=2).values], ([], expected))


@pytest.mark.parametrize(("loss_fn", "targets"), [
    (lambda y, t: (y - t).square().mean(-1), data(1)), (lambda y, t: 1.5, data(1)),
    (nn.MSELoss(reduction="sum"), data(1)), (partial(mse_loss, reduction="sum"), data(1)),
    (nn.CrossEntropyLoss(ignore_index=0), torch.arange(8) % 4),
    (nn.CrossEntropyLoss(weight=torch.ones(4)), torch.arange(8) % 4),
])
def test_a_loss_that_is_no_mean_is_refused(loss_fn: Any, targets: Tensor) -> None:
    with pytest.raises(dtlab.RankFailed, match=r"raised ConfigError: loss_fn must (return|be) the"):
        on("simulator", pipelined, "1F1B", None, [(data(0), targets)], loss_fn, ranks=2)


def test_a_parameter_that_two_layers_use_counts_once() -> None:
    def shared(made: list[Layer]) -> list[Layer]:
        for one, two, three in (made[:3], made[4:7]):
            two.linear.weight, three.linear.bias = one.linear.weight, two.linear.bias
        return made

    def step(comm: dtlab.Comm) -> Any:
        mine = pipeline.cut(shared(layers()), 2)[comm.rank]
        pipeline.Pipeline(mine, pipeline.zb_h1(2, 4), comm).step(data(0), data(1), mse_loss)
        return gradients(list(mine))

    one = shared(layers())
    mse_loss(nn.Sequential(*one)(data(0)), data(1)).backward()
    expected = gradients(one)
    for mine in on("simulator", step, ranks=2).values:
        for name, gradient in mine.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


class Scaled(nn.Module):
    """A loss that trains a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, y: Tensor, targets: Tensor) -> Tensor:
        return mse_loss(y * self.scale, targets)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_may_have_parameters(schedule: str) -> None:
    def step(comm: dtlab.Comm) -> Any:
        loss_fn = Scaled()
        pipe_of(comm, schedule, layers())[0].step(data(0), data(1), loss_fn)
        return loss_fn.scale.grad

    one = Scaled()
    one(nn.Sequential(*layers())(data(0)), data(1)).backward()
    found = [g for g in on("simulator", step, ranks=2).values if g is not None]
    torch.testing.assert_close(sum(found), one.scale.grad, rtol=1e-9, atol=1e-12)


def test_what_a_layer_outside_of_the_pipeline_computes_is_no_input() -> None:
    def step(comm: dtlab.Comm) -> None:
        pipe = pipeline.Pipeline(pipeline.cut(layers(), 2)[comm.rank], pipeline.gpipe(2, 4), comm)
        pipe.step(nn.Linear(4, 4).double()(data(0)), data(1), mse_loss)

    with pytest.raises(dtlab.RankFailed, match="raised ConfigError: each micro-batch would run"):
        on("simulator", step, ranks=2)


def test_a_parameter_that_is_handed_on_is_trained() -> None:
    def hands_on(layer: Layer, x: Any) -> Any:
        h, scale = x if layer.number else (x, 1.0)
        h = layer.linear(h).tanh() * scale
        return h if layer.number == 7 else (h, layer.linear.bias)

    def run(schedule: str) -> list[Any]:
        batch = [(data(0), data(1))]
        return on("simulator", pipelined, schedule, hands_on, batch, mse_loss, ranks=2).values

    for schedule in ("1F1B", "interleaved", "ZB-V"):
        assert_equal(run(schedule), one_device(hands_on, [(data(0), data(1))], mse_loss))


MISTAKES: dict[str, tuple[str, Any, Any, Any]] = {
    "fewer targets": ("equally many samples, not 8, 6", None, data(0), data(1, 6)),
    "a detached input": ("stage 1 gives no gradient to what stage 0 hands on",
                         lambda layer, x: layer.linear(x.detach() if layer.number == 4 else x),
                         data(0), data(1)),
    "no tensor": ("stage 0 must return a dense tensor, or a tuple, list or dict of them; there is "
                  "None in what it returns",
                  lambda layer, x: (layer.linear(x), None) if layer.number == 3 else
                  layer.linear(x), data(0), data(1)),
    "a sparse tensor": ("stage 0 must return a dense tensor", lambda layer, x: layer.linear(
        x).to_sparse() if layer.number == 3 else layer.linear(x), data(0), data(1)),
    "a detached output": ("stage 1 gives no gradient to what stage 0 hands on",
                          lambda layer, x: layer.linear(x).detach() if layer.number == 7 else
                          layer.linear(x), data(0), data(1)),
    "targets of two tensors": ("targets are one tensor", None, data(0), (data(1), data(1))),
    "no targets": ("targets are one tensor", None, data(0), None),
    "another form": ("stage 0 returns torch.float64 (2, 4) of micro-batch 2, but "
                     "(torch.float64 (2, 4), torch.float64 (2, 4)) of the first", changes_form,
                     data(0) + torch.tensor([[9.0]] * 4 + [[-9.0]] * 4), data(1)),
    "inputs of two tensors": ("inputs are one tensor", None, (data(0), data(1)), data(1)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake: str) -> None:
    says, use, x, y = MISTAKES[mistake]

    def step(comm: dtlab.Comm) -> None:
        stages = pipeline.cut(layers(use), 2)
        pipeline.Pipeline(stages[comm.rank], pipeline.gpipe(2, 4), comm).step(x, y, mse_loss)

    assert says in refused(step)


@pytest.mark.parametrize("of", [0, 1])
def test_ranks_with_batches_of_their_own_are_told(of: int) -> None:
    """Otherwise one rank's inputs would meet another's targets."""
    def step(comm: dtlab.Comm) -> None:
        batch = [data(0)[::2], data(1)[::2].bfloat16()]
        batch[of] = batch[of] + comm.rank
        pipeline.Pipeline(nn.Linear(4, 4), pipeline.gpipe(2, 4), comm).step(*batch, mse_loss)

    assert "rank 1 has another batch than rank 0" in refused(step)


@pytest.mark.parametrize(("wrap", "says"), [
    (lambda stage, comm: zero(stage, comm, 3)[0], "of ZeRO 3 can't be halved; take a schedule"),
    (lambda stage, comm: torch.compile(stage), "of compiled layers can't be halved"),
], ids=["zero 3", "compiled"])
def test_what_has_no_halves_is_refused_where_a_schedule_halves(wrap: Any, says: str) -> None:
    batch = [(data(0, 16), data(1, 16))]
    assert says in refused(lambda comm: pipelined(comm, "ZB-H1", None, batch, mse_loss, wrap), 4)


@pytest.mark.parametrize("recompute", [False, True])
def test_extras_that_a_stage_changes_in_place_are_refused(recompute: bool) -> None:
    """On one device the next stage would get what it made of them."""
    class Shifted(nn.Linear):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + shift.mul_(2)

    def step(comm: dtlab.Comm) -> None:
        pipe = pipeline.Pipeline(Shifted(4, 4).double(), pipeline.gpipe(2, 2), comm,
                                 recompute=recompute)
        pipe.step(data(0), data(1), mse_loss, data(2))

    with pytest.raises(dtlab.RankFailed, match="stage 0 changes an extra in place"):
        on("simulator", step, ranks=2)


def test_a_tied_parameter_in_zero_3_is_refused() -> None:
    def make(comm: dtlab.Comm) -> None:
        layer = nn.Linear(4, 4)
        stage, _ = zero(layer, comm.subgroup([comm.rank]), 3)
        pipeline.Pipeline(stage, pipeline.gpipe(2, 2), comm, tied={"w": layer.weight})

    with pytest.raises(dtlab.RankFailed, match="'w', which is tied, can't be in ZeRO 3"):
        on("simulator", make, ranks=2)


class Counted(nn.Module):
    """Counts how often forward runs, as BatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.scale


@pytest.mark.parametrize(("module", "says"), [
    (nn.Embedding(8, 4, scale_grad_by_freq=True), "leave scale_grad_by_freq out"),
    (Counted(), "recompute would change 'count' twice for each micro-batch"),
])
def test_what_micro_batches_would_change_is_refused(module: nn.Module, says: str) -> None:
    def step(comm: dtlab.Comm) -> None:
        plan = pipeline.gpipe(2, 4)
        pipe = pipeline.Pipeline([module, nn.Linear(4, 4)][comm.rank], plan, comm, recompute=True)
        x = torch.arange(8) if comm.rank == 0 and isinstance(module, nn.Embedding) else data(0)
        pipe.step(x, data(1).float(), mse_loss)

    with pytest.raises(dtlab.RankFailed, match=says):
        on("simulator", step, ranks=2)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}, {"pp": 2, "dp": 2}, {"dp": 2, "tp": 2}])
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("padding", ["uneven", "one sample", "all"])
def test_hybrid_means_over_all_targets_that_count(axes: dict[str, int], stage: int, padding: str
                                                  ) -> None:
    config = dtlab.models.GPTConfig(layers=2, hidden=16, heads=2, vocab=32, context=8)
    pieces = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(3))
    tokens, targets = pieces[:, :-1], pieces[:, 1:].clone()
    if padding == "uneven":
        targets[0, 1:] = targets[1, 3:] = -100
    else:
        targets[: {"one sample": 3, "all": 4}[padding]] = -100

    def step(comm: dtlab.Comm) -> Any:
        gpt = dtlab.models.GPT(config, dtype=torch.float64)
        model, optimizer = hybrid(gpt, Mesh(comm, **axes), micro_batches=2, stage=stage,
                                  optimizer=torch.optim.SGD, lr=1.0)
        loss = float(model.backward(tokens, targets))
        optimizer.step()
        return loss, dtlab.parallel.full_state_dict(model)

    gpt = dtlab.models.GPT(config, dtype=torch.float64)
    loss = cross_entropy(gpt(tokens).flatten(0, 1), targets.flatten())
    if padding != "all":
        loss.backward()
    ranks = 2 * len(axes)
    for found, state in on("simulator", step, ranks=ranks).values:
        assert found == pytest.approx(float(loss), rel=1e-12, nan_ok=True)
        for name, p in gpt.named_parameters():
            expected = p.detach() - (0 if p.grad is None else p.grad)
            torch.testing.assert_close(state[name], expected, rtol=1e-9, atol=1e-12)
