"""Batch normalization over all ranks' samples is that of one device with all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils

import dtlab
from dtlab.parallel import DataParallel, sync_batch_norm, types
from tests.parallel.training import on

SHAPES: dict[Any, tuple[int, ...]] = {nn.BatchNorm1d: (3,), nn.BatchNorm2d: (3, 4, 2),
                                      nn.BatchNorm3d: (3, 2, 1, 2)}
OPTIONS: list[dict[str, Any]] = [{}, {"momentum": None}, {"affine": False},
                                 {"track_running_stats": False}, {"momentum": 0.3, "eps": 0.1}]
SAMPLES = [[2, 3], [4, 0, 1], [1, 1, 1, 1], [7]]  # of each rank


def built(kind: Any, options: dict[str, Any]) -> nn.Sequential:
    torch.manual_seed(2)
    scale = nn.Linear(SHAPES[kind][-1], SHAPES[kind][-1])
    model = nn.Sequential(scale, kind(3, **options), nn.Tanh()).double()
    for p in model.parameters():
        nn.init.normal_(p)
    return model


def batches(kind: Any, samples: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(3)
    return [3 * torch.randn(samples, *SHAPES[kind], generator=random, dtype=torch.float64) + 2
            for _ in range(4)]


def run(model: Any, xs: list[Tensor]) -> dict[str, Tensor]:
    """Three steps of SGD on the sum of cubes, then evaluation."""
    seen = {}
    for number, x in enumerate(xs[:-1]):
        x.requires_grad_()
        model.zero_grad()
        y = model(x)
        y.pow(3).sum().backward()
        seen |= {f"y{number}": y.detach(), f"dx{number}": x.grad}
        seen |= {f"d{name}{number}": p.grad.clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
    model.eval()
    return seen | {"evaluated": model(xs[-1]).detach()} | dict(model.named_buffers())


@pytest.mark.parametrize("backend", ["gloo", "simulator"])
@pytest.mark.parametrize("kind", SHAPES)
def test_it_equals_one_device_on_all_samples(kind: Any, backend: str) -> None:
    for samples in SAMPLES if backend == "simulator" else SAMPLES[1:2]:
        def fn(comm: dtlab.Comm, samples: list[int] = samples) -> list[dict[str, Tensor]]:
            return [run(DataParallel(sync_batch_norm(built(kind, options), comm), comm),
                        [x.split(samples)[comm.rank].clone()
                         for x in batches(kind, sum(samples))])
                    for options in OPTIONS]

        values = on(backend, fn, ranks=len(samples)).values
        for number, options in enumerate(OPTIONS):
            alone = Scaled(built(kind, options), len(samples))
            expected = run(alone, batches(kind, sum(samples)))
            ranks = [value[number] for value in values]
            for name, truth in expected.items():
                found = ([torch.cat([rank[name] for rank in ranks])]
                         if name[:2] in ("y0", "y1", "y2", "dx", "ev")
                         else [rank[name] for rank in ranks])
                for one in found:
                    torch.testing.assert_close(one, truth, rtol=1e-12, atol=1e-12)


class Scaled(nn.Module):
    """A module whose parameters' gradients are those of the mean of `ranks` losses."""

    def __init__(self, module: nn.Module, ranks: int):
        super().__init__()
        self.module = module
        for p in module.parameters():
            p.register_hook(lambda gradient: gradient / ranks)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x)
        return y


def test_a_compiled_module_normalizes_over_all_ranks() -> None:
    def fn(comm: dtlab.Comm) -> Any:
        norm = sync_batch_norm(nn.BatchNorm1d(3).double(), comm)
        torch.compile(norm, backend="eager")(batches(nn.BatchNorm1d, 8)[0].chunk(2)[comm.rank])
        return norm.running_mean

    alone = nn.BatchNorm1d(3).double()
    alone(batches(nn.BatchNorm1d, 8)[0])
    for mean in on("gloo", fn, ranks=2).values:
        torch.testing.assert_close(mean, alone.running_mean)


def test_low_precision_is_computed_in_float32_as_torch_does() -> None:
    x = torch.randn(8, 3).bfloat16()

    def fn(comm: dtlab.Comm) -> Tensor:
        norm = sync_batch_norm(nn.BatchNorm1d(3), comm)
        y: Tensor = norm(x.chunk(2)[comm.rank])
        return y.detach()

    expected = nn.BatchNorm1d(3)(x).detach()
    torch.testing.assert_close(torch.cat(on("simulator", fn, ranks=2).values), expected)


def test_the_average_of_weights_has_all_ranks_statistics() -> None:
    """`update_bn` of a copy: it runs the copy in training, with momentum None."""
    def averaged(norms: nn.Module, xs: list[Tensor]) -> dict[str, Tensor]:
        average = swa_utils.AveragedModel(norms)
        swa_utils.update_bn(xs, average)
        return average.state_dict()

    xs = batches(nn.BatchNorm1d, 5)
    expected = averaged(built(nn.BatchNorm1d, {}), xs)
    for state in on("simulator", lambda comm: averaged(
            sync_batch_norm(built(nn.BatchNorm1d, {}), comm),
            [x.split([2, 3])[comm.rank] for x in xs]), ranks=2).values:
        torch.testing.assert_close(state, expected)


def test_second_derivatives_are_those_of_one_device() -> None:
    """As of a penalty on the gradient of the inputs."""
    def second(norm: nn.Module, x: Tensor) -> Tensor:
        x = x.double().requires_grad_()
        gradient, = torch.autograd.grad(norm.double()(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    x, = batches(nn.BatchNorm1d, 5)[:1]
    found = on("simulator", lambda comm: second(
        sync_batch_norm(nn.BatchNorm1d(x.shape[1]), comm), x.split([2, 3])[comm.rank]), ranks=2)
    torch.testing.assert_close(torch.cat(found.values), second(nn.BatchNorm1d(x.shape[1]), x))


def test_names_parameters_and_hooks_stay_and_types_accept_it() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model.append(model[0])  # twice
    names, parameters = list(model.state_dict()), list(model.parameters())

    def step(comm: dtlab.Comm, x: Tensor) -> Tensor:
        types.declare(x, comm, types.VARYING)
        mine = copy.deepcopy(model).to("meta")
        seen = []
        mine[0].register_forward_hook(lambda *_: seen.append(1))
        assert sync_batch_norm(mine, comm) is mine
        assert list(mine.state_dict()) == names
        loss: Tensor = DataParallel(mine, comm)(x).sum()
        assert len(seen) == 2
        return loss

    made = on("simulator", lambda comm: types.check(step, comm, torch.ones(4, 3)), ranks=2).values
    assert made[0][-1].letters == {"ranks": "V"}
    assert len(parameters) == 4


@pytest.mark.parametrize(("says", "call"), [
    ("takes BatchNorm1d, BatchNorm2d and BatchNorm3d, not LazyBatchNorm1d",
     lambda comm: sync_batch_norm(nn.Sequential(nn.LazyBatchNorm1d()), comm)),
    ("not SyncBatchNorm1d", lambda comm: sync_batch_norm(
        sync_batch_norm(nn.BatchNorm1d(3), comm), comm)),
    (r"takes a torch\.nn\.Module", lambda comm: sync_batch_norm(3, comm)),
    ("more than one value of a channel over all ranks, but they have 1",
     lambda comm: sync_batch_norm(nn.BatchNorm1d(3), comm)(torch.ones(1 - comm.rank, 3))),
    ("of 3 channels got 4",
     lambda comm: sync_batch_norm(nn.BatchNorm1d(3), comm)(torch.ones(2, 4))),
])
def test_what_does_not_fit_says_so(says: str, call: Any) -> None:
    def fn(comm: dtlab.Comm) -> None:
        with pytest.raises(dtlab.ConfigError, match=says):
            call(comm)

    on("simulator", fn, ranks=2)
