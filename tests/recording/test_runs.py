"""The runs behind the pictures: workers' clocks, copies of a server, placements of servers."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dtlab import ps, recording
from dtlab.ps.gpu_placement import GPU_PLACEMENTS
from dtlab.recording import ClockRun, placements, replica_run
from dtlab.recording.replica_run import FAR, MASTER, NEAR

SPEEDS = {1: 0.1, 2: 0.7, 3: 0.15}
STRONG = [ps.Chain(), ps.Leader(sync=True)]
WEAK = ps.Leader(sync=False)
CUTS_S = (0.012, 0.03, 0.05, 0.071, 0.09)


def run_of(rule: ps.Consistency, workers: int = 3, end_s: float = 1.2) -> ClockRun:
    return recording.watch_clocks(rule, lambda worker, _: SPEEDS[worker], workers, end_s)


def test_under_bsp_all_wait_for_the_slowest_at_each_clock() -> None:
    run = run_of(ps.BSP())
    waits = [i for i in run.iterations if i.waited]
    assert {i.worker for i in waits} == {1, 3}
    assert {run.releaser(i) for i in waits} == {2}
    for i in waits:
        assert i.read_s == pytest.approx(0.7 * i.clock, abs=1e-3)
        assert run.blockers(i, i.read_s - 0.01) == [2]
        assert run.blockers(i, i.read_s) == []
    assert run.most_ahead(1.2) == 0


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_under_ssp_readers_are_up_to_s_ahead_and_never_more(staleness: int) -> None:
    run = run_of(ps.SSP(staleness), end_s=2.5)
    assert run.most_ahead(2.5) == staleness
    first_wait = next(i for i in run.iterations if i.waited)
    assert first_wait.clock == staleness + 1


def test_under_asp_nobody_waits_and_staleness_is_the_updates_between() -> None:
    run = run_of(ps.ASP())
    assert not [i for i in run.iterations if i.waited]
    assert run.waiting_share(1.2) == 0
    slow = run.of[2][0]  # from 0 s to 0.7 s: worker 1 has ended 6 iterations, or 7; worker 3, 4
    assert slow.staleness in (10, 11)


def test_a_gradient_that_comes_too_late_is_marked_and_its_worker_catches_up() -> None:
    run = run_of(ps.BackupWorkers(1))
    late = [i for i in run.iterations if i.staleness is None]
    assert late[0].worker == 2
    assert run.late(1.2) == len([i for i in late if i.done_s <= 1.2]) > 0
    clocks = [i.clock for i in run.of[2]]
    assert all(after > before for before, after in pairwise(clocks))
    assert clocks[1] > 1  # it skipped the clocks that had closed without it
    assert run.gradients(1.2) + run.late(1.2) == sum(i.done_s <= 1.2 for i in run.iterations)


def test_equal_runs_are_equal() -> None:
    first, second = (run_of(ps.SSP(1)).iterations for _ in range(2))
    assert first == second


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_no_death_loses_a_push_that_was_acknowledged(rule: ps.Replication, victim: int) -> None:
    for event in range(10, 125, 19):
        run = replica_run(rule, victim=victim, event=event)
        assert run.acknowledged == run.counted == 20
        assert run.refused == run.lost == 0
        assert list(run.master_log.dead) == [victim]
        assert run.died_s < run.master_log.dead[victim]


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("cut_s", CUTS_S)
@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_a_strong_store_that_is_cut_refuses_and_loses_nothing(
    rule: ps.Replication, cut_s: float, look: bool
) -> None:
    """`look`: with reads in between, which once got stuck when a copy came back."""
    run = replica_run(rule, cut_s=cut_s, healed_s=cut_s + 0.05, look=look)
    assert len(run.replies) == 20
    assert run.lost == 0
    assert run.acknowledged <= run.counted <= run.acknowledged + run.refused
    assert {reply.worker for reply in run.replies if not reply.acknowledged} <= {NEAR}
    assert run.master_log.overlaps() == []


def test_a_weak_store_that_is_cut_refuses_nothing_and_loses_what_one_side_acknowledged() -> None:
    for cut_s in CUTS_S[1:3]:
        run = replica_run(WEAK, cut_s=cut_s, healed_s=cut_s + 0.05)
        assert run.refused == 0
        assert run.lost > 0
        assert run.counted + run.lost == 20


def test_a_cut_shorter_than_the_lease_harms_nobody() -> None:
    for rule in (*STRONG, WEAK):
        run = replica_run(rule, cut_s=0.03, healed_s=0.04)
        assert (run.acknowledged, run.lost, run.master_log.dead) == (20, 0, {})


def test_a_master_and_two_workers_stand_beside_the_copies() -> None:
    run = replica_run(ps.Chain())
    assert run.master_log.master == MASTER
    assert {reply.worker for reply in run.replies} == {FAR, NEAR}


@pytest.mark.parametrize("where", GPU_PLACEMENTS)
@pytest.mark.parametrize(("gpus", "switches"), [(1, 1), (2, 1), (4, 2), (8, 1), (8, 4)])
def test_a_placement_s_busiest_link_and_time_belong_together(where: str, gpus: int,
                                                             switches: int) -> None:
    one = placements(gpus, 5040_000, 1e9, switches).runs[where]
    # One server: the push fills one direction of its link, then the pull the other.
    halves = 2 if where in ("on GPU 0", "on the CPU") else 1
    assert one.elapsed_s == pytest.approx(halves * one.busiest / 1e9)
