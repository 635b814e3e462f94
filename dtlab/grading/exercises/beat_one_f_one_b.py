"""Chapter 12: a schedule of one's own under a memory limit, judged by its time."""

from __future__ import annotations

from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._pipeline import fitting
from dtlab.parallel.pipeline import Schedule, one_f_one_b, zb_h1, zb_h2


def _within(case: Case, outcome: Outcome) -> Schedule | Verdict:
    """The schedule, if it can run and keeps to the limit."""
    plan = fitting(case, outcome)
    if isinstance(plan, Verdict):
        return plan
    limit, held = case.args[0][-1], plan.time().held
    if max(held) <= limit:
        return plan
    rank = held.index(max(held))
    return Verdict(False, f"rank {rank} holds {max(held):g}", f"≤ {limit} micro-batches",
                   clue="A micro-batch is held from its forward until its W (or B): do a W before "
                        "the next forward, or begin with fewer forwards.")


def _valid(case: Case, outcome: Outcome) -> Verdict:
    plan = _within(case, outcome)
    return plan if isinstance(plan, Verdict) else Verdict(True, "it runs", "within the limit")


def _time(case: Case, outcome: Outcome, share: float) -> Verdict:
    """share: of the way from 1F1B's time to that of the best one that we know within the limit."""
    plan = _within(case, outcome)
    if isinstance(plan, Verdict):
        return plan
    p, m, *times, limit = case.args[0]
    known = [generate(p, m).time(*times) for generate in (one_f_one_b, zb_h1, zb_h2)]
    fair = [timing.elapsed for timing in known if max(timing.held) <= limit]
    allowed = fair[0] - share * (fair[0] - min(fair))
    came = plan.time(*times).elapsed
    table = " · ".join(f"{time:.4g}" for time in sorted(fair))
    better = came <= allowed + 1e-9 and (share or came < fair[0] - 1e-9)
    clue = ("Only the input's gradient is waited for: cut B into I and W, and do W where the rank "
            "would wait." if any(action.kind == "B" for row in plan.rows for action in row) else
            "Do the W's later: as many as the limit allows may wait, and fill the gaps at the end.")
    return Verdict(bool(better), f"{came:.4g} s", f"known schedules: {table} s",
                   clue="" if better else clue)


def _build(seed: int) -> list[Check]:
    def case(p: int, m: int, limit: int, times: tuple[float, ...] = (1.0, 2.0, 1.0, 0.0)) -> Case:
        m += 2 * (seed % 3)
        costs = "F {:g}, B {:g}, W {:g}, comm {:g}".format(*times)
        return Case(f"p = {p}, m = {m}, {costs}, limit {limit}", [(p, m, *times, limit)],
                    comm=False)

    even = [case(4, 8, 4), case(3, 8, 3), case(6, 14, 6), case(4, 12, 6)]
    uneven = [case(4, 12, 4, (1.0, 1.8, 0.6, 0.1)), case(4, 10, 4, (1.0, 2.2, 1.0, 0.2))]
    roomy = [case(4, 12, 7, (1.0, 1.8, 0.6, 0.1)), case(3, 10, 5, (1.0, 2.4, 0.8, 0.0))]

    def beats(case: Case, outcome: Outcome) -> Verdict:
        return _time(case, outcome, 0.0)

    def equals(case: Case, outcome: Outcome) -> Verdict:
        return _time(case, outcome, 1.0)

    return [
        Check("runs", 2, "within the limit", [*even, *uneven, *roomy], _valid),
        Check("faster", 3, "than 1F1B, F = I = W", even, beats, provided=_valid),
        Check("uneven times", 2, "other times of F, B, W, messages", uneven, beats,
              provided=_valid),
        Check("as the best", 2, "as fast as the best known within the limit, F = I = W", even,
              equals, provided=_valid),
        Check("more room", 1, "a limit of 2p − 1, used", roomy, equals, provided=_valid),
    ]


EXERCISE = Exercise("beat-one-f-one-b", "Beat 1F1B", "12", 2, "schedule", _build)
