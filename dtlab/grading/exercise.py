"""What an exercise is, and how its checks become the rows of a report.

An exercise is one file in `dtlab/grading/exercises/` that defines `EXERCISE`; nothing else has to
know of it.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from dtlab.errors import ConfigError
from dtlab.grading.case import Case, CaseFailure, Outcome
from dtlab.grading.report import Row, whole


class Verdict(NamedTuple):
    """What a check says of one case. `clue` is a hint, if the result shows the mistake; if it is
    `sure`, the clue goes before the check's own hint."""

    passed: bool
    came: str
    expected: str
    nbytes: str = ""  # "used / allowed"
    rounds: str = ""
    clue: str = ""
    sure: bool = False


class Trial(NamedTuple):
    """A case, its outcome, and the verdict."""

    case: Case
    outcome: Outcome
    verdict: Verdict


@dataclass(frozen=True)
class Check:
    """One row of the report: all its cases must pass to earn its points.

    What an answer costs counts once its values are right: such a check has `provided`, and is not
    looked at unless the exercise's first check passes.
    """

    name: str
    points: float
    tried: str  # the cases in one phrase, shown when all pass
    cases: Sequence[Case]
    judge: Callable[[Case, Outcome], Verdict]
    hint: str = ""  # the likely mistake if this fails though the first check passes
    provided: Callable[[Case, Outcome], Verdict] | None = None  # see `grade_check`


@dataclass(frozen=True)
class Exercise:
    """`build(seed)` makes the checks: the notebook's check uses seed 0, the hidden tests another,
    so that an answer fitted to the shown cases earns nothing."""

    id: str
    title: str
    chapter: str
    order: int  # among the chapter's exercises
    function: str  # the name that the learner defines
    build: Callable[[int], list[Check]]

    @property
    def points(self) -> float:
        """What a right answer earns."""
        return whole(sum(check.points for check in self.build(0)))


# ---- the registry ------------------------------------------------------------------------------


@cache
def catalogue() -> Mapping[str, Exercise]:
    """All exercises by id, in the order of the chapters."""
    from dtlab.grading import exercises as package

    found: list[Exercise] = []
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("_"):
            loaded = importlib.import_module(f"{package.__name__}.{module.name}")
            found.append(loaded.EXERCISE)
    return {each.id: each for each in sorted(found, key=lambda e: (e.chapter, e.order))}


def find_exercise(exercise_id: str) -> Exercise:
    """The exercise of this id, else `ConfigError` that lists the known ones."""
    known = catalogue()
    if not isinstance(exercise_id, str) or exercise_id not in known:
        raise ConfigError(
            f"there is no exercise {exercise_id!r}; the exercises are: {', '.join(known)}"
        )
    return known[exercise_id]


# ---- judging -----------------------------------------------------------------------------------


def grade_check(check: Check, outcomes: Mapping[Case, Outcome], earlier: Sequence[Row],
                before: Set[Case] = frozenset()) -> Row:
    """The row of `check`, given the outcomes of its cases, the rows of the checks before it, and
    the cases whose values those have judged: one that was wrong there has cost its points already,
    so it is left out where `check` counts what right values cost."""
    first = earlier[0] if earlier else None
    if check.provided is not None and first is not None and not first.passed:
        return not_tried(check, f"counts once “{first.name}” is right")
    trials = []
    for case in check.cases:
        outcome = outcomes[case]
        verdict = verdict_of(check, case, outcome)
        if check.provided is not None:
            provided = verdict_of(replace(check, judge=check.provided), case, outcome)
            if not provided.passed and case in before:
                continue
            verdict = verdict if provided.passed else provided
        trials.append(Trial(case, outcome, verdict))
    if not trials:
        return not_tried(check, "right values here first")
    return row_of(check, trials, earlier)


def not_tried(check: Check, why: str) -> Row:
    """The row of a check that was not looked at."""
    return Row(check.name, False, 0, check.points, check.tried, "not tried", why, looked_at=False)


def verdict_of(check: Check, case: Case, outcome: Outcome) -> Verdict:
    """What `check` says; a case without a result fails whatever is checked."""
    failure = outcome.failure
    if failure is None and not case.library and (name := _collective_in(outcome)):
        return Verdict(False, f"the answer calls {name}", "messages of your own", sure=True,
                       clue=f"The answer calls {name}{_NOT_YOURS}")
    if failure is None:
        verdict = _judged(check, case, outcome)
        if outcome.objects and verdict.nbytes and not verdict.passed:
            verdict = verdict._replace(clue=_OBJECTS)
        return verdict
    where = f" on rank {failure.rank}" if failure.rank >= 0 and case.ranks > 1 else ""
    if failure.kind == "raised":
        message = failure.message.removeprefix(f"rank {failure.rank}: ")
        came = f"{failure.error}{where}: {message}".rstrip(": ")
    else:
        came = f"{_KINDS[failure.kind]}{where}: {failure.message}"
    at = f" ({failure.at})" if failure.at else ""
    text = f"{failure.message}\n{failure.details}"
    own = next((hint for part, hint in case.errors.items() if part in text), "")
    return Verdict(False, _clip(came + at), "a result", clue=own or failure_hint(outcome),
                   sure=bool(own))


def _judged(check: Check, case: Case, outcome: Outcome) -> Verdict:
    """What returned may be anything, also what no check expects."""
    try:
        return check.judge(case, outcome)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError):
        return Verdict(False, f"returned {outcome.values!r:.100}", "what the task asks for")


_OBJECTS = ("Objects are sent (a list, a number, …), and an object travels pickled, which takes "
            "more bytes: send the tensor itself, and receive into a tensor.")

_NOT_YOURS = ", which is the library's own: only what you write yourself earns points."


def _collective_in(outcome: Outcome) -> str:
    """The collective of this package that some message is labelled with; "" if none is."""
    calls = (re.match(r"(\w+)\(.*algorithm=", m.label) for m in outcome.trace.transfers)
    return next((f"dtlab.collectives.{call[1]}" for call in calls if call), "")


_KINDS = {
    "deadlock": "deadlock",
    "hung": "still running",
    "pending": "not waited for",
    "died": "process died",
    "limit": "never stopped",
    "skipped": "not tried",
}


def failure_hint(outcome: Outcome) -> str:
    """The likely mistake behind a call that gave no result; "" if it isn't clear."""
    failure = outcome.failure
    assert failure is not None
    if failure.kind == "skipped":
        return ""
    if failure.kind == "deadlock":
        return _deadlock_hint(failure)
    if failure.kind == "pending":
        return ("Call wait() on everything that isend, irecv, post and begin return, or cancel() "
                f"it, before the function returns. This line began it: {failure.at}.")
    if failure.kind in ("hung", "limit"):
        at = f" The last line seen: {failure.at}." if failure.at else ""
        return f"The function does not end: look for an infinite loop.{at}"
    if failure.kind == "died":
        return ("A rank's process ended before the function returned. Don't call exit; return, or "
                "raise an error.")
    return _raised_hint(failure.error, failure.message)


def _deadlock_hint(failure: CaseFailure) -> str:
    doing = {line.split()[1] for line in failure.details.splitlines()[1:]}
    if doing == {"send"}:
        return ("Every rank waits for another. A send may block until its receiver is there, so a "
                "cycle in which all ranks send first never ends: use comm.sendrecv, or "
                "comm.exchange.")
    if doing == {"recv"}:
        return ("Every rank waits to receive, and none has sent yet: receiving first in a cycle "
                "never ends. Send and receive at once: comm.sendrecv, or comm.exchange.")
    if "returned" in doing:
        return ("Some ranks have returned, while others still wait for them: is every send met by "
                "a receive on the other rank, and the other way round? The table says who waits.")
    return ("The ranks wait for each other: does the rank that you send to receive from you next, "
            "and the one that you receive from send to you? The table says who waits for whom.")


def _raised_hint(error: str, message: str) -> str:
    if error == "NotYourOwn":
        return f"{message[:1].upper()}{message[1:]}{_NOT_YOURS}"
    if error == "TypeError" and "'tuple' object does not support item assignment" in message:
        return ("x.tensor_split gives a tuple: its tensors can be changed, the tuple can't, and "
                "`chunks[b] += inbox` assigns to it. Write `chunks[b].add_(inbox)`, or "
                "`comm.accumulate_(chunks[b], inbox)`: both change x in place.")
    if re.search(r"can't (send to|receive from) rank -?\d", message):
        return ("There is no such rank: ranks are 0 to p − 1. In a circle, (rank + 1) % p and "
                "(rank - 1) % p go round; in a tree or a hypercube, leave out what does not exist.")
    if message.endswith("so receive into another tensor"):
        return ("A tensor is received into while it is being sent. Receive into another one; or, "
                "if you pass on what comes, send in each step what came in the step before.")
    if error == "NotImplementedError":
        return "Not written yet: replace `raise NotImplementedError` by your answer."
    if message.startswith("split is not for sending"):
        return f"S{message[1:]}."
    if "process group" in message:
        return ("torch.distributed isn't the communicator here. Everything goes through `comm`: "
                "comm.send, comm.recv, comm.sendrecv.")
    if error == "NameError":
        return (f"{message.capitalize()}: define what the function needs in the solution cell "
                "itself, or import it there.")
    if error == "ShapeMismatch" and "an object" in message:
        return ("One end sends a tensor and the other receives an object, or the other way round. "
                "A tensor is received into a tensor of its shape and dtype, such as "
                "torch.empty_like(x), an object into a list.")
    if error == "ShapeMismatch":
        return ("What one rank sends differs in size from what the other receives into. Do both "
                "ends mean the same part of the vector, and cut it in the same places? Its parts "
                "differ in size when p does not divide n.")
    if error == "MemoryError":
        return "The function asks for more memory than there is."
    return ""


def row_of(check: Check, trials: Sequence[Trial], earlier: Sequence[Row]) -> Row:
    """The report's row: a summary if all passed, else the first case that did not."""
    bad = next((trial for trial in trials if not trial.verdict.passed), None)
    if bad is None:
        v = trials[-1].verdict
        few = len(trials) < len(check.cases)
        tried = check.tried + few * f"; {len(trials)} of {len(check.cases)} cases have right values"
        return Row(check.name, True, check.points, check.points, tried, v.came, v.expected,
                   v.nbytes, v.rounds)
    if bad.outcome.failure is not None and bad.outcome.failure.kind == "skipped":
        return not_tried(check, bad.outcome.failure.message)
    v = bad.verdict
    good = sum(trial.verdict.passed for trial in trials)
    score = f"; {good} of {len(trials)} cases right" if len(trials) > 1 else ""
    hint = v.clue
    if (not earlier or earlier[0].passed) and _ended(bad.outcome):
        # What is special about a case, or real about processes, is to blame if all else works.
        own = bad.case.hint or check.hint
        if (bad.case.hint or bad.case.gloo) and not all(row.passed for row in earlier):
            own = ""
        hint = own or v.clue if earlier and not v.sure else v.clue or own
    return Row(check.name, False, 0, check.points, bad.case.tried + score, v.came, v.expected,
               v.nbytes, v.rounds, hint)


def _ended(outcome: Outcome) -> bool:
    """Did the function end, and its process live on? Then the check's own hint may apply."""
    return outcome.failure is None or outcome.failure.kind in ("raised", "deadlock", "pending")


def skipped(reason: str) -> Outcome:
    """The outcome of a case that was not tried."""
    return Outcome(failure=CaseFailure("skipped", message=reason))


def _clip(text: str, limit: int = 220) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
