"""Chapter 12: a schedule of one's own under a memory limit, judged by its time."""

from __future__ import annotations

from dtlab.grading.case import Case, Outcome
from dtlab.grading.draws import scale, varied
from dtlab.grading.exercise import Check, Exercise, Judge, Verdict
from dtlab.grading.exercises._pipeline import of_schedule
from dtlab.parallel.pipeline import Schedule, one_f_one_b, zb_h1, zb_h2


def _whole(schedule: Schedule) -> bool:
    """Does it compute both gradients at once anywhere, by B?"""
    return any(action.kind == "B" for row in schedule.rows for action in row)


@of_schedule
def _within(case: Case, schedule: Schedule) -> Verdict:
    """Does the schedule, which can run, keep to the limit?"""
    limit, held = case.args[0][-1], schedule.time().held
    rank = held.index(max(held))
    return Verdict(held[rank] <= limit, f"rank {rank} holds {held[rank]:g} micro-batches",
                   f"≤ {limit} micro-batches", evidence=[held, _whole(schedule)])


def _time(share: float) -> Judge:
    """share: of the way from 1F1B's time to that of the zero-bubble schedule which has one stage a
    rank and fits: ZB-H2, or else ZB-H1."""
    @of_schedule
    def judge(case: Case, schedule: Schedule) -> Verdict:
        p, m, *times, limit = case.args[0]
        known = [generate(p, m).time(*times) for generate in (one_f_one_b, zb_h1, zb_h2)]
        fair = [timing.elapsed for timing in known if max(timing.held) <= limit]
        allowed = fair[0] - share * (fair[0] - min(fair))
        actual, whole = schedule.time(*times).elapsed, _whole(schedule)
        names = " · ".join(f"{name} {s:.4g}" for name, s in zip(("1F1B", "ZB-H1", "ZB-H2"), fair,
                                                                strict=False))
        return Verdict(actual <= allowed + 1e-9 and (share > 0 or actual < fair[0] - 1e-9),
                       f"{actual:.4g} s", f"{names} s", evidence="B" if whole else actual)

    def limited(case: Case, outcome: Outcome) -> Verdict:
        within = _within(case, outcome)
        return judge(case, outcome) if within.passed else within

    return limited


def _build(seed: int) -> list[Check]:
    def case(p: int, m: int, limit: int, times: tuple[float, ...] = (1.0, 2.0, 1.0, 0.0)) -> Case:
        m += 2 * varied(seed, 6, p, m, limit)
        grow = scale(seed, p, m, limit)
        times = tuple(grow * seconds for seconds in times)
        costs = "F {:g}, B {:g}, W {:g}, comm {:g}".format(*times)
        return Case(f"p = {p}, m = {m}, {costs}, limit {limit}", [(p, m, *times, limit)],
                    comm=False)

    even = [case(4, 8, 4), case(3, 8, 3), case(6, 14, 6), case(4, 12, 6)]
    uneven = [case(4, 12, 4, (1.0, 1.8, 0.6, 0.1)), case(4, 10, 4, (1.0, 2.2, 1.0, 0.2))]
    roomy = [case(4, 12, 7, (1.0, 1.8, 0.6, 0.1)), case(3, 10, 5, (1.0, 2.4, 0.8, 0.0))]
    return [
        Check("runs", 2, "within the limit", [*even, *uneven, *roomy], _within),
        Check("faster", 3, "than 1F1B, F = I = W", even, _time(0.0), _within),
        Check("uneven times", 2, "other times of F, B, W, messages", uneven, _time(0.0), _within),
        Check("as ZB-H1", 2, "as fast as ZB-H1, F = I = W", even, _time(1.0), _within),
        Check("more room", 1, "a limit of 2p − 1: as fast as ZB-H2", roomy, _time(1.0), _within),
    ]


EXERCISE = Exercise("beat-one-f-one-b", "Beat 1F1B", "schedule", _build)
