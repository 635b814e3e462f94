"""Exercises: each is one file in `dtlab/grading/exercises/`, which defines `EXERCISE`; its place in
the course stands in `CHAPTERS`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from dtlab.errors import ConfigError
from dtlab.grading.case import Case, Outcome
from dtlab.grading.report import whole

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


FAR_MORE = "a process takes far more memory"  # than its own meter says
WITH_COLLECTIVES = ("collectives", "cost")  # the library of an answer that may do so


class Verdict(NamedTuple):
    """A check's verdict on one case. `shows`: what it has looked at (numbers, tensors, texts; by
    default the words of `actual`): answers that show the same have made the same mistake. `clue`:
    the mistake, where the result itself tells it, as the error of a schedule does."""

    passed: bool
    actual: str
    expected: str
    nbytes: str = ""  # "used / allowed"
    rounds: str = ""
    shows: Any = None
    clue: str = ""


Judge = Callable[[Case, Outcome], Verdict]


@dataclass(frozen=True)
class Check:
    """One row of the report: all its cases must pass to earn its points.

    The cost of an answer counts once its values are right: such a check has `requires`, the judge
    of the values, and is not looked at unless the exercise's first check passes.
    """

    name: str
    points: float
    tried: str  # the cases in one phrase, shown when all pass
    cases: Sequence[Case]
    judge: Judge
    requires: Judge | None = None
    metered: bool = False  # by the answer's own process: real ones must not show otherwise


@dataclass(frozen=True)
class Exercise:
    """`build(seed)` makes the checks: the notebook's check uses seed 0, the hidden tests another,
    so that an answer fitted to the shown cases earns nothing. The mistakes that people make in it,
    and all hints, are in `solutions/mistakes/`: see `dtlab.grading.mistakes`."""

    id: str
    title: str
    function: str  # the name that the learner defines
    build: Callable[[int], list[Check]]
    # The parts of this package that its ranks find in the sandbox; "-…": without this module.
    library: tuple[str, ...] = ()

    @property
    def chapter(self) -> str:
        """The chapter's number, in two digits."""
        return next(chapter for chapter, ids in CHAPTERS.items() if self.id in ids)

    @property
    def points(self) -> float:
        """The points that a right answer earns."""
        return whole(sum(check.points for check in self.build(0)))


def module_name(exercise_id: str) -> str:
    """ring_all_reduce, of "ring-all-reduce": the name of its files."""
    return exercise_id.replace("-", "_")


@cache
def find_exercise(exercise_id: str) -> Exercise:
    """The exercise of this id, else `ConfigError` that lists the known ones. No other is loaded."""
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
