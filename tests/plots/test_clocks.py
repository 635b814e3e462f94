"""The clock picture tells what the parameter server did: who waited, for whom, how far ahead."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from dtlab import plots, ps, recording
from dtlab.recording import ClockRun

SPEEDS = {1: 0.1, 2: 0.7, 3: 0.15}


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


def test_the_words_say_who_waits_for_whom_at_a_moment() -> None:
    run = run_of(ps.BSP())
    alt = plots.clocks(run, 0.2).alt
    assert "worker 1: clock 1, waits for 2" in alt
    assert "worker 2: clock 0, computes" in alt
    assert "worker 3: clock 1, waits for 2" in alt
    assert "worker 1: clock 0, waits" not in plots.clocks(run, 0.05).alt


def test_the_waits_of_the_lanes_make_up_the_share_that_waited() -> None:
    alt = plots.clocks(recording.watch_clocks(ps.SSP(3), recording.PACES["one slow worker"])).alt
    lanes_s = sum(map(float, re.findall(r"waited ([\d.]+) s", alt)))
    share, end_s = (float(re.search(mark, alt)[1]) for mark in (r"(\d+)% of", r"after ([\d.]+) s"))
    assert lanes_s / (5 * end_s) == pytest.approx(share / 100, abs=0.025)


def test_equal_runs_are_equal() -> None:
    first, second = (run_of(ps.SSP(1)).iterations for _ in range(2))
    assert first == second


def test_what_has_diverged_is_said_and_drawn_at_the_upper_edge() -> None:
    picture = plots.loss_sweep({"a": {0.1: [0.2, 0.3, 0.4], 1.0: [float("nan"), 50.0, 1.0]}},
                               "step size (learning rate)")
    assert "0.1 0.30, 1 diverged" in picture.alt


def test_the_thick_line_is_the_median_of_the_seeds() -> None:
    curves = [[(0.0, 4.0), (1.0, level)] for level in (1.0, 2.0, 9.0)]
    assert "x: 2 at 1" in plots.loss_curves({"x": curves}, "(s)").alt


def test_a_worker_that_has_not_begun_is_not_said_to_be_at_its_end() -> None:
    run = run_of(ps.BSP())
    assert "at its end" not in plots.clocks(run, 0.0).alt
    assert plots.clocks(run, 0.0).alt.count("clock 0, about to begin") == 3
