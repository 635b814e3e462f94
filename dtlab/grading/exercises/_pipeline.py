"""Judges shared by the exercises on pipeline schedules: of rows of actions, as text."""

from __future__ import annotations

from collections.abc import Callable

from dtlab.errors import ConfigError
from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Judge, Verdict
from dtlab.parallel.pipeline import Schedule

MOST_ACTIONS = 20_000
_CLUES = {  # part of the error of a schedule that can't run → the mistake
    "comes after it on rank": "An action stands before what it needs: W needs its I; backward "
                              "needs its forward; and micro-batches pass the stages one after "
                              "the other.",
    "deadlock": "The ranks wait for each other: compare, on both, the order in which they touch "
                "these two micro-batches. (Backwards go through the micro-batches in the order of "
                "the forwards, 0 first.)",
    "done twice": "A micro-batch passes each stage forward once, and backward once.",
    "missing": "An action never comes: each micro-batch needs, on each stage, F, and then B, or "
               "I and W. After the last forward, the backwards that are left must follow.",
    "one too many": "Either B, which computes both gradients, or I and W.",
    "is on rank": "Each stage belongs to one rank: rank r has stage r.",
    "is no action": "Write each action as stage, letter, micro-batch: f\"{r}F{i}\".",
}


def of_schedule(judge: Callable[[Case, Schedule], Verdict]) -> Judge:
    """Decorates a function that judges a schedule which can run, and is for the case's ranks and
    micro-batches; any other is judged here."""
    def judged(case: Case, outcome: Outcome) -> Verdict:
        value, (p, m) = outcome.values[0], case.args[0][:2]
        if isinstance(value, str) or any(isinstance(row, str) for row in value):
            return Verdict(False, f"{value!r:.40}", "for each rank a list of texts", clue="Return "
                           "a list with, for each rank, a list of texts such as \"0F0\".")
        rows = [" ".join(row).split() for row in value]
        if (count := sum(map(len, rows))) > MOST_ACTIONS:
            return Verdict(False, f"{count:,} actions", f"at most {MOST_ACTIONS:,}", evidence=rows)
        try:
            schedule = Schedule.parse("\n".join(" ".join(row) or "." for row in rows))
            if schedule.ranks == p and schedule.micro_batches <= m:
                schedule.check()
        except ConfigError as error:
            reason = str(error).splitlines()[0]
            clue = next((clue for word, clue in _CLUES.items() if word in reason), "")
            return Verdict(False, reason, "a schedule that can run", clue=clue, evidence=rows)
        if (schedule.ranks, schedule.micro_batches) != (p, m):
            return Verdict(False, f"{schedule.ranks} ranks, {schedule.micro_batches} micro-batches",
                           f"{p} ranks, {m} micro-batches", clue="One list for each of the p "
                           "ranks, and micro-batches 0 to m − 1: begin with min(m, p − r) of "
                           "the forwards.", evidence=rows)
        if not all(schedule.rows):
            return Verdict(False, f"rank {schedule.rows.index(())} does nothing", "a stage on each "
                           "rank", clue=_CLUES["is on rank"], evidence=rows)
        return judge(case, schedule)

    return judged
