"""Wherever gradients are added up, the sum is the same; what it costs is not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from dtlab import Comm, ConfigError, collectives, ps, run, simulate
from dtlab.topology import uniform

RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13)


def gradient(rank: int, n: int = 11) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float64) * (rank + 1) + rank


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("placement", ["on_one", "spread", "tree"])
def test_a_push_and_a_pull_by_all_is_an_all_reduce(placement: str, op: str) -> None:
    def body(comm: Comm) -> Any:
        mine, same = gradient(comm.rank), gradient(comm.rank)
        found = ps.aggregate(comm, mine, placement, op=op)
        return found is mine, found, collectives.all_reduce(comm, same, op=op)

    for ranks in RANKS:
        for in_place, found, wanted in simulate(body, network=uniform(ranks, 1e-6, 1e9)).values:
            assert in_place
            torch.testing.assert_close(found, wanted, rtol=1e-15, atol=0)


MACHINES = [[0, 1, 2, 3], [4, 5, 6], [7, 8]]


def test_a_cpu_that_adds_up_has_no_gradient_of_its_own() -> None:
    def body(comm: Comm) -> Any:
        return ps.aggregate(comm, gradient(comm.rank), "on_cpu"), \
            ps.aggregate(comm, gradient(comm.rank), "two_level", op="avg", machines=MACHINES)

    gpus = [1, 2, 3, 5, 6, 8]
    for one, two in simulate(body, network=uniform(9, 1e-6, 1e9)).values:
        torch.testing.assert_close(one, sum(gradient(rank) for rank in range(1, 9)))
        torch.testing.assert_close(two, sum(gradient(rank) for rank in gpus) / 6)


def test_the_two_levels_take_seven_steps_in_order() -> None:
    def body(comm: Comm) -> None:
        with comm.compute("1 gradients", seconds=1e-3):
            pass
        ps.aggregate(comm, gradient(comm.rank), "two_level", machines=MACHINES)

    trace = simulate(body, network=uniform(9, 1e-6, 1e9)).trace
    begin: dict[str, float] = {}
    for span in trace.spans:
        begin.setdefault(span.label[0], span.start_s)
    for message in trace.transfers:
        begin.setdefault(message.label[0], message.start_s)
    assert sorted(begin, key=begin.__getitem__) == list("1234567")
    steps = Counter(message.label[0] for message in trace.transfers)
    assert steps == {"2": 3, "3": 3, "4": 2, "5": 2, "6": 3, "7": 3}  # "4": one gradient a machine


@pytest.mark.parametrize(("placement", "ranks", "wanted_s"), [
    ("on_one", 4, 0.060), ("on_cpu", 5, 0.080), ("spread", 4, 0.015),
])
def test_160_megabytes_on_four_gpus(placement: str, ranks: int, wanted_s: float) -> None:
    """Through GPU 0 60 ms, through the CPU 80 ms, spread over the GPUs 15 ms, at 16 GB/s."""
    def body(comm: Comm) -> None:
        ps.aggregate(comm, torch.empty(40_000_000, device="meta"), placement)

    elapsed_s = simulate(body, network=uniform(ranks, 0, 16e9)).elapsed_s
    assert elapsed_s == pytest.approx(wanted_s, rel=1e-9)


def test_on_processes_too() -> None:
    def body(comm: Comm) -> Any:
        return [ps.aggregate(comm, gradient(comm.rank), placement)
                for placement in ("on_one", "spread", "tree")]

    for founds in run(body, ranks=3).values:
        for found in founds:
            torch.testing.assert_close(found, sum(gradient(rank) for rank in range(3)))


@pytest.mark.parametrize(("options", "says"), [
    ({"placement": "moon"}, "no placement 'moon'; choose one of on_one"),
    ({"op": "max"}, "'sum' or 'avg'"),
    ({"placement": "tree", "fanout": 0}, "1 or more"),
    ({"placement": "two_level", "machines": [[0, 1]]}, "each of the 3 ranks once"),
    ({"placement": "two_level", "machines": [[0, 1], [2]]}, "at least one GPU"),
])
def test_mistakes_are_named(options: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        simulate(lambda comm: ps.aggregate(comm, gradient(comm.rank), **options),
                 network=uniform(3, 1e-6, 1e9))
