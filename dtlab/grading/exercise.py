"""The types of an exercise, and the catalogue of all. Each file in `dtlab/grading/exercises/`
defines one `EXERCISE`; `CHAPTERS` says in which chapter it is."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from dtlab.errors import ConfigError
from dtlab.grading.case import Case, Outcome
from dtlab.grading.report import int_if_whole

CHAPTERS = {
    "00": ("hello-ranks", "fix-deadlock"),
    "01": ("unequal-shards", "efficiency"),
    "02": ("finish-times", "place-job"),
    "03": ("fit-alpha-beta", "shift"),
    "04": ("binomial-broadcast", "pipelined-chain", "best-segments", "bruck-all-to-all"),
    "05": ("ring-all-reduce", "halving-doubling"),
    "06": ("hierarchical", "find-rings"),
    "07": ("sharded-store", "two-level-step"),
    "08": ("ssp-rule", "dc-asgd", "top-k"),
    "09": ("chain-replication", "consistent-hashing"),
    "10": ("bucketed-average", "overlapped-backward", "accumulated-average",
           "growing-batch"),
    "11": ("row-parallel", "vocab-loss", "find-the-lie"),
    "12": ("one-f-one-b", "beat-one-f-one-b"),
    "13": ("zero-stage-1", "zero-stage-3"),
    "14": ("order-axes", "choose-layout", "hidden-cluster"),
    "15": ("restart-bits", "surviving-checkpoint", "best-interval", "shrink"),
}

# The result of a check if a process takes far more memory than its own meter says.
FAR_MORE = "a process takes far more memory"
WITH_COLLECTIVES = ("collectives", "cost")  # `Exercise.library` if answers may call collectives


class Verdict(NamedTuple):
    """A check's verdict on one case. evidence: what the check compared (numbers, tensors, texts;
    default: the words of `actual`). Answers with the same evidence have made the same mistake.
    clue: the mistake, if the result itself tells it, as the error of a schedule does."""

    passed: bool
    actual: str
    expected: str
    nbytes: str = ""  # "used / allowed"
    rounds: str = ""
    evidence: Any = None
    clue: str = ""


Judge = Callable[[Case, Outcome], Verdict]


@dataclass(frozen=True)
class Check:
    """One row of the report: all its cases must pass to earn its points. A check of an answer's
    cost has `requires`, the judge of the answer's values: a case's cost is judged only if its
    values are right, and only once the exercise's first check passes."""

    name: str
    points: float
    tried: str  # the cases in one phrase, shown when all pass
    cases: Sequence[Case]
    judge: Judge
    requires: Judge | None = None
    # The check relies on the meter in the answer's own process, so it fails, too, if a check over
    # Gloo finds `FAR_MORE` memory.
    metered: bool = False


@dataclass(frozen=True)
class Exercise:
    """`build(seed)` makes the checks. The notebook's check uses seed 0, the hidden tests another
    seed, so that an answer fitted to the shown cases earns nothing. Hints, and the mistakes that
    people make, are in `solutions/mistakes/`: see `dtlab.grading.mistakes`."""

    id: str
    title: str
    function: str  # the name that the learner defines
    build: Callable[[int], list[Check]]
    # The parts of this package that its ranks can import in the sandbox; "-…": not this module.
    library: tuple[str, ...] = ()

    @property
    def chapter(self) -> str:
        """The chapter's number, in two digits."""
        return next(chapter for chapter, ids in CHAPTERS.items() if self.id in ids)

    @property
    def points(self) -> float:
        """The points that a right answer earns."""
        return int_if_whole(sum(check.points for check in self.build(0)))


def module_name(exercise_id: str) -> str:
    """Return the name of the exercise's files: "ring-all-reduce" gives "ring_all_reduce"."""
    return exercise_id.replace("-", "_")


@cache
def find_exercise(exercise_id: str) -> Exercise:
    """Load the exercise of this id alone. `ConfigError` lists the known ids."""
    known = [each for ids in CHAPTERS.values() for each in ids]
    if exercise_id not in known:
        raise ConfigError(
            f"there is no exercise {exercise_id!r}; the exercises are: {', '.join(known)}"
        )
    module = importlib.import_module(f"dtlab.grading.exercises.{module_name(exercise_id)}")
    exercise: Exercise = module.EXERCISE
    return exercise


def catalogue() -> Mapping[str, Exercise]:
    """All exercises by id, in the order of the chapters."""
    return {each: find_exercise(each) for ids in CHAPTERS.values() for each in ids}
