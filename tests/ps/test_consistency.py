"""Who may be how far ahead of whom: proved on random speeds, in virtual time."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtlab import ConfigError, ps, simulate
from dtlab.topology import uniform
from tests.ps.shared import on_workers
from tests.simulator.shared import pause

STEPS = 8


def diaries(consistency: ps.Consistency, speeds: list[list[float]], servers: int = 1) -> Any:
    """The servers' statistics; and of each worker, when it ended each pull and each clock."""
    @on_workers({"w": torch.zeros(4)}, servers=servers, consistency=consistency,
                update=ps.SGD(lr=1.0), partition=ps.Range())
    def body(node: ps.Node) -> Any:
        pulled, clocked = [], []
        for step in range(STEPS):
            node.pull(["w"])
            pulled.append(node.comm.now())
            pause(node.comm, "step", speeds[node.comm.rank - servers][step])
            node.push({"w": torch.ones(4)})
            clocked.append(node.comm.now())
            node.clock()
        return pulled, clocked

    values = simulate(body, network=uniform(servers + len(speeds), 1e-7, 1e12)).values
    return values[:servers], values[servers:]


def leads(workers: list[tuple[list[float], list[float]]]) -> list[int]:
    """For each pull, how many clocks its worker was ahead of the slowest when it returned."""
    found = []
    for pulled, _ in workers:
        for step, at_s in enumerate(pulled):
            slowest = min(sum(ended < at_s for ended in clocked) for _, clocked in workers)
            found.append(step - slowest)
    return found


a_speed = st.floats(0.001, 1.0)
all_speeds = st.integers(2, 4).flatmap(
    lambda workers: st.lists(st.lists(a_speed, min_size=STEPS, max_size=STEPS),
                             min_size=workers, max_size=workers))


@given(speeds=all_speeds, staleness=st.integers(0, 5), servers=st.integers(1, 2))
def test_ssp_never_lets_a_worker_be_more_than_s_clocks_ahead(
    speeds: list[list[float]], staleness: int, servers: int
) -> None:
    _, workers = diaries(ps.SSP(staleness), speeds, servers)
    assert max(leads(workers)) <= staleness


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("staleness", range(6))
def test_ssp_lets_a_worker_be_s_clocks_ahead_and_waits_no_earlier(
    staleness: int, servers: int
) -> None:
    """One worker ten times as fast: it runs s clocks ahead without waiting, then in step."""
    servers_, workers = diaries(ps.SSP(staleness), [[0.01] * STEPS, [0.1] * STEPS], servers)
    assert max(leads(workers)) == staleness
    fast = workers[0][0]
    free = [later - sooner for sooner, later in pairwise(fast)][:staleness]
    assert free == pytest.approx([0.01] * len(free), rel=1e-3)
    for step in range(staleness + 1, STEPS):  # waits for the other's clock `step - s`, no longer
        assert fast[step] == pytest.approx(workers[1][1][step - staleness - 1], rel=1e-3)
    assert max(servers_[0].ahead) == staleness


@given(speeds=all_speeds)
def test_bsp_keeps_all_in_step(speeds: list[list[float]]) -> None:
    servers, workers = diaries(ps.BSP(), speeds)
    assert set(leads(workers)) == {0}
    assert set(servers[0].staleness) == {0}


@given(speeds=all_speeds)
def test_asp_never_waits(speeds: list[list[float]]) -> None:
    _, workers = diaries(ps.ASP(), speeds)
    for (pulled, _), mine in zip(workers, speeds, strict=True):
        gaps = [later - sooner for sooner, later in pairwise(pulled)]
        assert gaps == pytest.approx(mine[:-1], abs=1e-5)


@pytest.mark.parametrize(("n", "updates"), [(1, 8), (2, 16), (3, 32), (4, 32)])
def test_softsync_updates_after_each_group_of_gradients(n: int, updates: int) -> None:
    """4 workers, 8 steps: 32 gradients in groups of ⌊4/n⌋."""
    servers, _ = diaries(ps.SoftSync(n), [[0.01 + w / 1000] * STEPS for w in range(4)])
    assert servers[0].updates == updates


@pytest.mark.parametrize(("consistency", "rule", "pushes", "stored"), [
    (ps.SoftSync(1), ps.SGD(lr=1.0), ([-1.0, 0.0], [0.0, -1.0]), [0.5, 0.5]),
    (ps.SoftSync(1), ps.FedAvg(), ([10.0, 0.0], [0.0, 10.0]), [5.0, 5.0]),
    (ps.SoftSync(1), ps.EASGD(alpha=0.1), ([10.0, 0.0], [10.0, 10.0]), [2.0, 1.0]),
    (ps.BSP(), ps.FedAvg(), ([10.0, 10.0], [10.0, 10.0]), [10.0, 10.0]),
    (ps.BSP(), ps.EASGD(alpha=0.1), ([10.0, 0.0], [10.0, 10.0]), [2.0, 1.0]),
    (ps.BSP(), ps.SGD(lr=1.0), ([-1.0, 0.0], [0.0, -1.0]), [0.5, 0.5]),  # micro-batches; and a zero
])
def test_an_update_is_the_mean_of_its_pushes_though_one_worker_made_them_all(
    consistency: ps.Consistency, rule: ps.Update, pushes: tuple[list[float], ...],
    stored: list[float],
) -> None:
    @on_workers({"w": torch.zeros(2)}, consistency=consistency, update=rule)
    def body(node: ps.Node) -> Any:
        if node.comm.rank == 1:
            for push in pushes:
                node.push({"w": torch.tensor(push)})
        node.clock()
        pause(node.comm, "until both pushes are in", 1.0)
        return node.pull(["w"])["w"].tolist()

    for found in simulate(body, network=uniform(3, 1e-6, 1e9)).values[1:]:
        assert found == pytest.approx(stored)


def test_the_staleness_of_softsync_is_about_n() -> None:
    """With λ workers of equal speed a gradient of n-softsync is about n updates old."""
    for n in (1, 2, 5, 10):
        servers, _ = diaries(ps.SoftSync(n), [[1 + w / 100] * STEPS for w in range(10)])
        steady = servers[0].mean_staleness * STEPS / (STEPS - 1)  # the first ones are fresh
        assert 0.5 * n <= steady + 0.5 <= 1.5 * n + 0.5


def test_backup_workers_wait_for_the_first_n_and_drop_what_comes_late() -> None:
    speeds = [[0.01] * STEPS, [0.011] * STEPS, [1.0] * STEPS]  # the third is a straggler
    servers, workers = diaries(ps.BackupWorkers(1), speeds)
    assert workers[0][1][-1] < 0.1  # the two never waited for it
    assert servers[0].dropped > 0
    assert servers[0].dropped + sum(servers[0].staleness.values()) == 3 * STEPS


def test_bsp_waits_for_the_straggler_and_drops_nothing() -> None:
    speeds = [[0.01] * STEPS, [0.011] * STEPS, [1.0] * STEPS]
    servers, workers = diaries(ps.BSP(), speeds)
    assert workers[0][1][-1] > 7.0
    assert servers[0].dropped == 0
    assert servers[0].waits[1] > 6.0


def test_a_late_worker_starts_again_at_the_open_clock() -> None:
    """Its next gradient counts again: it is not late for ever."""
    @on_workers({"w": torch.zeros(1)}, consistency=ps.BackupWorkers(1), update=ps.SGD(lr=1.0))
    def body(node: ps.Node) -> Any:
        slow_first = [0.505, 0.001, 0.001] if node.comm.rank == 3 else [0.01] * 60
        for seconds in slow_first:
            node.pull(["w"])
            pause(node.comm, "step", seconds)
            node.push({"w": torch.full((1,), -1.0 if node.comm.rank == 3 else 0.0)})
            node.clock()
        return node.pull(["w"])["w"].item()

    server, last, _, _ = simulate(body, network=uniform(4, 1e-7, 1e12)).values
    assert server.clocks[3] > 40  # it skipped what had closed without it
    assert 0.66 <= last <= 1  # two of its three gradients count, each in a mean of two or three


@pytest.mark.parametrize(("fraction", "workers", "needed"), [
    (0.9, 10, 9), (0.5, 3, 2), (1.0, 7, 7), (0.01, 5, 1), (0.7, 10, 7),
])
def test_a_quorum_is_that_fraction_rounded_up(fraction: float, workers: int, needed: int) -> None:
    assert ps.Quorum(fraction).quorum(workers) == needed


def test_a_worker_that_finishes_early_holds_nobody_up() -> None:
    @on_workers({"w": torch.zeros(1)}, update=ps.SGD(lr=1.0))
    def body(node: ps.Node) -> Any:
        for _ in range(node.comm.rank):  # worker 1 leaves first
            node.pull(["w"])
            node.push({"w": -torch.ones(1)})
            node.clock()
        return node.pull(["w"])["w"].item()

    assert simulate(body, network=uniform(4, 1e-6, 1e9)).values[1:] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("make", "says"), [
    (lambda: ps.SSP(-1), "0 or more"),
    (lambda: ps.SSP(1.5), "whole"),
    (lambda: ps.SSP(math.nan), "whole"),
    (lambda: ps.SSP("2"), "whole"),
    (lambda: ps.SoftSync(0), "1 or more"),
    (lambda: ps.BackupWorkers(-1), "0 or more"),
    (lambda: ps.Quorum(0), "above 0"),
    (lambda: ps.Quorum(1.1), "at most 1"),
])
def test_rules_that_make_no_sense_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()
