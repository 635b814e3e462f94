"""What the exercises on pipeline schedules judge alike: rows of actions, as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtlab.errors import ConfigError
from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Verdict
from dtlab.parallel.pipeline import Schedule

MOST_ACTIONS = 20_000
_CLUES = {
    "comes after it on rank": "An action stands before what it needs: W needs its I; backward "
                              "needs its forward; and micro-batches pass the stages one after "
                              "the other.",
    "deadlock": "The ranks wait for each other: compare, on both, the order in which they touch "
                "these two micro-batches. (Backwards go through the micro-batches in the order of "
                "the forwards, 0 first.)",
    "done twice": "A micro-batch passes each stage forward once, and backward once.",
    "missing": "Some backward (or forward) never comes: after the last forward, the backwards that "
               "are left must follow, on each rank.",
    "one too many": "Either B, which computes both gradients, or I and W.",
    "is on rank": "Each stage belongs to one rank: rank r has stage r.",
    "is no action": "Write each action as stage, letter, micro-batch: f\"{r}F{i}\".",
}


def of_plan(judge: Callable[[Case, Schedule], Verdict]) -> Callable[[Case, Outcome], Verdict]:
    """Decorates a function that judges a schedule which can run; for any other, the verdict is
    what `fitting` says."""
    def judged(case: Case, outcome: Outcome) -> Verdict:
        plan = fitting(case, outcome)
        return plan if isinstance(plan, Verdict) else judge(case, plan)

    return judged


def fitting(case: Case, outcome: Outcome) -> Schedule | Verdict:
    """The schedule that the learner's function returned, if it can run, and is for the case's ranks
    and micro-batches."""
    value: Any = outcome.values[0]
    p, m = case.args[0][:2]
    good = (isinstance(value, (list, tuple)) and value
            and all(isinstance(row, (list, tuple)) for row in value)
            and all(isinstance(word, str) for row in value for word in row))
    if not good:
        return Verdict(False, f"returned {str(value)[:60]}", "a list of actions for each rank",
                       clue='Return a list with, for each rank, a list of texts such as "0F0".')
    if sum(map(len, value)) > MOST_ACTIONS:
        return Verdict(False, f"{sum(map(len, value)):,} actions", f"at most {MOST_ACTIONS:,}")
    try:
        plan = Schedule.parse("\n".join(" ".join(row) or "." for row in value))
        if plan.ranks != p or plan.micro_batches > m:
            return Verdict(False, f"{plan.ranks} ranks, {plan.micro_batches} micro-batches",
                           f"{p} ranks, {m} micro-batches", sure=True,
                           clue="One list for each of the p ranks, and micro-batches 0 to m − 1: "
                                "begin with min(m, p − i) forwards.")
        plan.check()
    except ConfigError as error:
        reason = str(error).splitlines()[0]
        clue = next((clue for word, clue in _CLUES.items() if word in reason), "")
        return Verdict(False, reason, "a schedule that can run", clue=clue, sure=True)
    if plan.micro_batches < m:
        return Verdict(False, f"{plan.micro_batches} micro-batches", f"{m} micro-batches",
                       clue="There are micro-batches 0 to m − 1.", sure=True)
    return plan
