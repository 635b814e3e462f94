"""What chapter 08 says in prose is true; each sentence is looked up there, then compared with what
the chapter prints, which nbval has computed again, or recomputed with the chapter's own functions.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import numpy as np
import pytest

from dtlab import ps, recording, simulate
from tests.notebooks.chapter import Chapter

CHAPTER = Chapter("08")
printed = CHAPTER.printed
DEFINITIONS = ("setup", "seconds", "cluster", "train-code", "train-iteration", "final-losses",
               "largest-step", "federated", "copies", "svrg")


@pytest.fixture(scope="module")
def chapter() -> dict[str, Any]:
    """The chapter's functions."""
    return CHAPTER.defined(*DEFINITIONS)


def gradient_s(pauses: float, workers: int) -> float:
    """What the slowest of so many takes on average, by counting: 20 or 100 ms."""
    return 0.020 * (1 - pauses) ** workers + 0.100 * (1 - (1 - pauses) ** workers)


def test_the_slowest_sets_the_pace(prose: str, chapter: dict[str, Any]) -> None:
    assert "one worker needs 24 ms on average" in prose
    assert gradient_s(0.05, 1) == pytest.approx(0.024)
    assert "it takes 20 + 80·(1 − 0.95ᵐ) ms on average" in prose
    for workers in (1, 2, 8, 32):
        assert gradient_s(0.05, workers) == pytest.approx(0.020 + 0.080 * (1 - 0.95**workers))
    assert "in 81 % of the iterations at least one of 32 does" in prose
    assert round(1 - 0.95**32, 2) == 0.81
    drawn = [chapter["seconds"](0, worker, step) for worker in range(50) for step in range(100)]
    assert np.mean(drawn) == pytest.approx(0.024, rel=0.05)


@pytest.mark.parametrize("pace", ["one slow worker"])
def test_no_bounded_rule_outruns_a_worker_that_is_always_slow(prose: str, pace: str) -> None:
    assert (
        "no rule that bounds the lead over the slowest can outrun a worker that is always slow"
    ) in prose
    late, end_s = [], 8.0
    for rule in (ps.BSP(), ps.SSP(1), ps.SSP(3)):
        run = recording.watch_clocks(rule, recording.PACES[pace], end_s=end_s)
        half = [sum(end_s / 2 < i.done_s <= end_s for i in run.of[w]) for w in run.ranks]
        late.append(half[0])
    assert max(late) - min(late) <= 1  # in the second half, worker 1 is no faster with any bound
    free = recording.watch_clocks(ps.ASP(), recording.PACES[pace], end_s=end_s)
    assert sum(i.done_s > end_s / 2 for i in free.of[1]) > 1.8 * max(late)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_against_rare_pauses_ssp_needs_more_than_one_clock(
    prose: str, chapter: dict[str, Any], seed: int
) -> None:
    assert ("SSP with s = 1 and a backup worker are about even among eight workers; of fifty, "
            "several are late at once, and SSP uses half as many gradients again") in prose

    def used_per_second(rule: ps.Consistency, workers: int = 8) -> float:
        result = simulate(chapter["clocks_only"], rule, 60, partial(chapter["seconds"], seed),
                          network=chapter["cluster"](workers), trace=False)
        return sum(result.values[0].staleness.values()) / result.elapsed_s

    backup, one, three = map(used_per_second, (ps.BackupWorkers(1), ps.SSP(1), ps.SSP(3)))
    assert one == pytest.approx(backup, rel=0.06)
    assert three > 1.1 * backup
    backup, one = (used_per_second(rule, 50) for rule in (ps.BackupWorkers(1), ps.SSP(1)))
    assert 1.4 < one / backup < 1.8


def test_the_bound_is_kept_and_reached_and_each_step_of_it_saves_one_clock_once(prose: str) -> None:
    assert "The bound is kept, and it is reached" in prose
    assert "0.04 s, the time that the slow worker takes for one clock, once" in prose
    rows = re.findall(r"at most +(\d+) ahead; worker 1 waited ([\d.]+) s", printed("bound-table"))
    ahead, waited = zip(*((int(most), float(s)) for most, s in rows), strict=True)
    assert ahead[:7] == (0, 0, 1, 2, 3, 4, 5)  # BSP, and SSP with 0 to 5
    assert waited[0] == waited[1]
    assert -np.diff(waited[1:7]) == pytest.approx([0.04] * 5, abs=0.002)


def test_against_time_who_waits_less_is_ahead_and_against_gradients_nobody_is(
    prose: str, chapter: dict[str, Any]
) -> None:
    assert "ASP is done with all its 240 gradients after 0.9 s, and BSP after 1.5" in prose
    rules = ((ps.ASP(), 0.1), (ps.BSP(), 0.8))
    asp_s, bsp_s = (np.median([simulate(
        chapter["train"], rule, ps.SGD(lr), 240, seed, network=chapter["cluster"](8), trace=False,
    ).elapsed_s for seed in range(3)]) for rule, lr in rules)
    assert (asp_s, bsp_s) == pytest.approx((0.9, 1.5), abs=0.05)
    assert "Against gradients they lie on top of each other" in prose
    found = re.findall(r"([^:;]+): ([\d.]+) at ([\d.]+)[;.]", printed("train-time"))
    loss, end_s = ({name.strip(): float(row[column]) for name, *row in found} for column in (0, 1))
    assert end_s["ASP"] < end_s["SSP, s = 2"] < end_s["BSP"]
    assert end_s["ASP"] / end_s["BSP"] == pytest.approx(0.5, abs=0.12)
    assert max(loss.values()) < 1.2 * min(loss.values())


def test_the_staleness_of_n_softsync_is_close_to_n_and_a_little_below(
    prose: str, chapter: dict[str, Any]
) -> None:
    assert "The mean is close to n, and a little below it" in prose
    assert "With n = 9 it would be that of n = 16, for ⌊16/9⌋ is 1" in prose
    network = chapter["cluster"](16)
    nine, sixteen = (simulate(chapter["clocks_only"], ps.SoftSync(n), 30, network=network,
                              trace=False).values[0].mean_staleness for n in (9, 16))
    assert nine == sixteen
    assert "1-softsync makes as many updates as BSP" in prose
    rows = re.findall(r"(\d+)-softsync +mean staleness +([\d.]+), +(\d+) updates",
                      printed("staleness-plot"))
    for n, mean, updates in ((int(n), float(mean), int(updates)) for n, mean, updates in rows):
        assert n * (1 - 1 / 16) == pytest.approx(mean, rel=0.1)
        assert mean < n
        assert updates == 30 * n
    assert len(rows) == 4


def test_the_largest_stable_step_is_that_of_the_recursion(
    prose: str, chapter: dict[str, Any]
) -> None:
    """The formula of section 7 against the recursion itself, iterated: with L = 1, alone = 2."""
    assert "this dies out, rather than swinging higher and higher" in prose

    def end(step: float, delay: int) -> float:
        w = [1.0] * (delay + 1)
        for _ in range(4000):
            w.append(w[-1] - step * w[-1 - delay])
        return max(map(abs, w[-50:]))

    for delay in (0, 1, 2, 7, 15):
        limit = chapter["largest_step"](delay, alone=2.0)
        assert end(0.97 * limit, delay) < 1 < end(1.03 * limit, delay)
    assert "about π/(2τL)" in prose
    assert chapter["largest_step"](200, 2.0) == pytest.approx(math.pi / 2 / 200, rel=0.01)
    share = chapter["largest_step"](15) / chapter["largest_step"](0)
    assert share == pytest.approx(1 / 20, rel=0.03)  # "staleness 15 allows a twentieth of the step"


def test_asynchronous_training_converges_with_small_steps_and_not_with_large_ones(
    prose: str, chapter: dict[str, Any]
) -> None:
    def loss(lr: float, workers: int) -> float:
        found = chapter["final_losses"](ps.ASP(), ps.SGD(lr), workers)
        return float(np.median(np.nan_to_num(found, nan=np.inf)))

    assert "With small steps staleness is hardly seen" in prose
    small, medium = ({int(workers): float(end) for workers, end in
                      re.findall(r"'(\d+) workers?': ([\d.]+)", row)}
                     for row in re.findall(r"step 0.\d+: .*", printed("guess-compare")))
    assert set(small) == {1, 8, 16}  # workers, with the step 0.05
    assert max(small.values()) < 1.1 * small[1]
    assert "With large steps it is a cliff" in prose
    assert "fine at 0.8" in prose
    assert loss(0.8, 1) < loss(0.2, 1) < 0.4
    assert loss(0.2, 16) > 4.0
    assert "The parabola predicts the cliffs within a factor of about two" in prose
    eight, limit = {lr: loss(lr, 8) for lr in (0.2, 0.3)}, chapter["largest_step"]
    assert eight[0.2] < 1.0 < eight[0.3]
    assert limit(7) / 2 < 0.2 < 0.3 < 2 * limit(7)
    assert medium[16] < 1.0 < loss(0.16, 16)  # with the step 0.1
    assert limit(15) / 2 < 0.1 < 0.16 < 2 * limit(15)
    assert "its best loss here, at 0.8, is out of reach for 16 workers" in prose
    assert loss(0.8, 1) < 0.3 * medium[16]
    assert "the lowest loss is at step 0.1\n" in printed("convergence-table")
    assert ("of fifteen runs, those of 8 workers end between 0.3 and 2.1, and 16 between 0.5 and "
            "1.8") in prose
    for workers, lr, least, most in ((8, 0.2, 0.3, 2.15), (16, 0.1, 0.5, 1.8)):
        ends = [simulate(chapter["train"], ps.ASP(), ps.SGD(lr), 160, seed, trace=False,
                         network=chapter["cluster"](workers)).values[1][0] for seed in range(15)]
        assert least < min(ends) < least + 0.1 < most - 0.1 < max(ends) < most


def test_staleness_aware_steps_never_fall_off_and_compensation_gains_one_point_of_the_grid(
    prose: str, chapter: dict[str, Any]
) -> None:
    def end(update: Any) -> list[float]:
        ends = chapter["final_losses"](ps.ASP(), update, 8)
        return [loss if loss < 2 else math.inf for loss in ends]  # a model that knows nothing: 2.3

    assert "Staleness-aware training stays clear of the cliff at every step tried here" in prose
    assert max(end(ps.StalenessAwareSGD(0.8))) < 0.6
    assert np.median(end(ps.StalenessAwareSGD(0.1))) > 2 * np.median(end(ps.SGD(0.1)))
    assert "Divide its steps by about five and its curve is nearly that of plain" in prose
    for lr in (0.3, 0.8):
        assert np.median(end(ps.StalenessAwareSGD(lr))) == pytest.approx(
            np.median(end(ps.SGD(lr / 5))), rel=0.1)
    assert "DC-ASGD at 0.2 is close to plain SGD" in prose
    assert np.median(end(ps.DCASGD(0.2, lam=32.0))) == pytest.approx(
        np.median(end(ps.SGD(0.2))), rel=0.1)
    assert "moves the cliff to the right. It doesn't remove it" in prose
    assert "At step 0.3 two of three seeds fail with plain SGD, and none with the" in prose
    assert end(ps.SGD(0.3)).count(math.inf) == 2
    assert max(end(ps.DCASGD(0.3, lam=32.0))) < 0.8
    assert "at 0.4 two of three fail with it, too" in prose
    assert end(ps.DCASGD(0.4, lam=32.0)).count(math.inf) == 2


def test_waiting_for_nine_of_ten(prose: str, chapter: dict[str, Any]) -> None:
    assert "makes a clock a third shorter, and costs one gradient in twenty" in prose
    clock_s, lost = [], []
    for rule in (ps.BSP(), ps.Quorum(0.9)):
        result = simulate(chapter["clocks_only"], rule, 60, trace=False,
                          network=chapter["cluster"](10))
        server = result.values[0]
        clock_s.append(result.elapsed_s / server.closed)
        lost.append(server.dropped / (server.dropped + sum(server.staleness.values())))
    assert 1 - clock_s[1] / clock_s[0] == pytest.approx(1 / 3, abs=0.05)
    assert lost == [0, pytest.approx(1 / 20, abs=0.01)]
    assert "The table's 8.8 is lower because the last clocks" in prose
    assert server.closed > 60  # the last ones are of those who have been left behind
    assert "A quorum of 90 % is the same thing, said as a share" in prose
    for workers in (1, 5, 9, 10, 20, 100):
        late = workers - ps.Quorum(0.9).quorum(workers)
        assert ps.BackupWorkers(late).quorum(workers) == ps.Quorum(0.9).quorum(workers)


def test_what_only_the_slowest_knows_is_lost(prose: str) -> None:
    assert "it is always the slowest, and with it all that only the slowest knows" in prose
    everyone, without_the_slowest = re.findall(r"(\d+)% of the nines", printed("biased-run"))
    assert int(everyone) > 90
    assert int(without_the_slowest) < 5


def test_talking_less(prose: str, chapter: dict[str, Any]) -> None:
    assert "sends a thirteenth of the bytes" in prose
    data = chapter["data"]
    mixed = [data.shard(worker, 8) for worker in range(8)]
    rows = data.y.argsort(stable=True).tensor_split(8)
    by_digit = [type(data)(data.x[each], data.y[each]) for each in rows]
    assert '"Sorted" gives each worker two or three digits only' in prose
    assert {len(set(shard.y.tolist())) for shard in by_digit} == {2, 3}

    def run(shards: Any, local: int) -> tuple[int, float]:
        server, loss, *_ = simulate(chapter["federated"], shards, local, trace=False,
                                    network=chapter["cluster"](8)).values
        return server.received_bytes + server.sent_bytes, loss

    often, seldom, apart = run(mixed, 1), run(mixed, 16), run(by_digit, 16)
    assert often[0] / seldom[0] == pytest.approx(13, abs=0.5)
    assert seldom[1] < 1.2 * often[1]
    assert apart[1] > 3 * seldom[1]


def test_who_gets_how_far_after_a_death(prose: str) -> None:
    assert "BSP stops at once, SSP two clocks later" in prose
    assert "one backup worker replaces the dead one, and ASP doesn't notice" in prose
    done = printed("breaks-dead-run")
    assert re.findall(r"done: \{1: (\d+)", done) == ["5", "7", "10", "10"]
    assert "deadlock" in done


def test_copies_save_as_much_as_a_backup_worker_and_lose_no_gradient(
    prose: str, chapter: dict[str, Any]
) -> None:
    assert "35 of 600 gradients begun twice, and none lost" in prose
    found = re.findall(r"([\d.]+) ms a clock, (\d+) gradients begun, +(\d+) thrown",
                       printed("copies-run"))
    ms, begun, lost = zip(*(map(float, row) for row in found), strict=True)
    assert begun == (600, 635, 600)
    assert lost[:2] == (0, 0)
    assert lost[2] > 0
    assert "Copies save more than a third of the time, as a backup worker does" in prose
    assert max(ms[1:]) < 2 / 3 * ms[0]
    assert ms[1] == pytest.approx(ms[2], rel=0.1)


def test_a_copy_starts_once_three_quarters_are_done_and_after_one_and_a_half_medians(
    prose: str, chapter: dict[str, Any]
) -> None:
    assert "once 75 % of the tasks are done, a task that has run for more than 1.5 times" in prose
    seconds = {1: 10.0, 2: 20.0, 3: 30.0, 4: 90.0}
    starts, copies = chapter["copies_start"], chapter["with_copies"]
    assert starts(lambda worker, step: seconds[worker], 0, workers=4) == 30  # 1.5 · 20, and 3 of 4
    for times in (1.5, 2.0, 2.5, 3.0, 5.0):  # one worker of ten, always
        slow = [1.0] * 9 + [times]
        pace = copies(lambda worker, step, slow=slow: slow[worker - 1], lambda worker, step: 1.0)
        assert max(pace(worker, 0) for worker in range(1, 11)) == min(times, 2.5)
    assert "Up to 2.5 times slower, not at all" in prose
    rows = re.findall(r"([\d.]+) times slower: +([\d.]+) ms a clock, with copies +([\d.]+)",
                      printed("copies-slow"))
    for times, alone, copied in (map(float, row) for row in rows):
        assert (copied == alone) == (times <= 2.5)
        assert copied <= 51.2


def test_two_spare_workers_pay_for_themselves(prose: str) -> None:
    rows = re.findall(r"([\d.]+) s, +([\d.]+) worker-seconds", printed("spare-run"))
    took, cost = zip(*(map(float, row) for row in rows), strict=True)  # 0, 1, 2, 4; all of ten
    assert "One spare worker saves a third of the time, two save half" in prose
    assert took[1] / took[0] == pytest.approx(2 / 3, abs=0.04)
    assert took[2] / took[0] == pytest.approx(1 / 2, abs=0.04)
    assert took[3] > 0.9 * took[2]  # "then it levels off"
    assert "ten machines for less than half of the time cost less than eight" in prose
    assert took[2] < took[0] / 2
    assert min(cost) == cost[2]
    assert "need half as long again as 8 + 2" in prose
    assert took[4] / took[2] == pytest.approx(1.5, abs=0.05)


def test_svrg_goes_on_where_sgd_stands_still_and_the_cliff_stays(
    prose: str, chapter: dict[str, Any]
) -> None:
    far, ridge_gradient = chapter["far_from_best"], chapter["ridge_gradient"]
    assert abs(ridge_gradient(chapter["at_best"])).max() < 1e-9
    assert "SGD stands still at 0.02 to 0.03 above the least loss" in prose
    for name, *ends in re.findall(r"(SGD|SVRG) +([\de-]+) +([\de-]+) +([\de-]+)",
                                  printed("svrg-run")):
        if name == "SGD":
            assert all(0.008 < float(end) < 0.04 for end in ends)
        else:
            assert float(ends[-1]) < 1e-10  # "SVRG goes on"
    assert "at step 0.2 SVRG still converges with fresh gradients, and with a delay of 15" in prose
    assert far(0, True, 60_000, lr=0.2) < 1e-5 < 1e-3 < far(15, True, 60_000, lr=0.2)
