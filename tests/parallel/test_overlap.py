"""How long ranks only communicate: less from strategy to strategy, and as the closed form says."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import dtlab
from dtlab import cost
from dtlab.parallel import DataParallel, charge_compute, zero

LAYERS, WIDTH, ALPHA, BETA = 12, 23, 1e-5, 1e-8
LAYER_BYTES = 8 * (23 * 25 + 1)  # with the count of its weight: all ranks divide 576


def layers() -> nn.Sequential:
    """Of weights (25, 23) and (23, 25) in turn."""
    return nn.Sequential(*(nn.Linear(25 if i % 2 else 23, 23 if i % 2 else 25, bias=False).double()
                           for i in range(LAYERS)))


def step(comm: dtlab.Comm, strategy: str, buckets: int, forward_s: float) -> None:
    model = DataParallel(layers(), comm, strategy, LAYERS // buckets * LAYER_BYTES, "ring")
    charge_compute(comm, dict.fromkeys(model.module, forward_s))
    model(torch.ones(1, WIDTH, dtype=torch.float64)).sum().backward()


@cache
def start_s_of(ranks: int) -> list[float]:
    """What the broadcast of the parameters at the start takes, by rank."""
    trace = dtlab.simulate(lambda comm: DataParallel(layers(), comm) and None,
                           network=dtlab.topology.uniform(ranks, ALPHA, 1 / BETA)).trace
    return [trace.exposed_s(rank) for rank in range(ranks)]


def exposed_s(ranks: int, strategy: str, buckets: int, forward_s: float) -> list[float]:
    """By rank, less what the broadcast of the parameters at the start takes."""
    network = dtlab.topology.uniform(ranks, ALPHA, 1 / BETA)
    whole = dtlab.simulate(step, strategy, buckets, forward_s, network=network).trace
    return [whole.exposed_s(rank) - start_s for rank, start_s in enumerate(start_s_of(ranks))]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("buckets", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("forward_s", [1e-6, 2e-5, 4e-5, 1e-3])
def test_exposed_communication_is_the_closed_form(
        ranks: int, buckets: int, forward_s: float) -> None:
    for overlap in (True, False):
        expected = cost.exposed_s(2 * forward_s * LAYERS, LAYERS * LAYER_BYTES, buckets, ranks,
                                  ALPHA, BETA, overlap=overlap)
        measured = exposed_s(ranks, "overlap" if overlap else "bucket", buckets, forward_s)
        assert max(measured) == pytest.approx(expected, rel=1e-6)


def test_stage_3_hides_its_gathers_behind_the_layers() -> None:
    def train(comm: dtlab.Comm, forward_s: float) -> float:
        model, optimizer = zero(layers(), comm, 3, torch.optim.SGD, algorithm="ring", lr=0.1)
        charge_compute(comm, dict.fromkeys(model.module, forward_s))
        before = comm.now()
        model(torch.ones(1, WIDTH, dtype=torch.float64)).sum().backward()
        optimizer.step()
        return comm.now() - before

    network = dtlab.topology.uniform(4, ALPHA, 1 / BETA)
    gather_s = cost.time_s("all_gather", "ring", 4, LAYER_BYTES, ALPHA, BETA)
    for forward_s in (2 * gather_s, 3 * gather_s):
        taken_s = max(dtlab.simulate(train, forward_s, network=network).values)
        computed_s = 3 * forward_s * LAYERS
        # Exposed: the first gather of each direction, and the last layer's reduction.
        assert taken_s < computed_s + 6 * gather_s
    with pytest.raises(dtlab.ConfigError, match="buckets must be a whole number"):
        cost.exposed_s(1.0, 100, 0, 4, ALPHA, BETA)
