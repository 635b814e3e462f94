"""Chapter 00: this rank, the number of ranks, the neighbours"""

from __future__ import annotations

from dtlab.grading.case import Case, Wanted, describe_case
from dtlab.grading.draws import varied
from dtlab.grading.exercise import Check, Exercise
from dtlab.grading.standard import items, values

ITEMS = ("rank", "size", "left", "right")


def _case(size: int) -> Case:
    right = [(rank, size, (rank - 1) % size, (rank + 1) % size) for rank in range(size)]
    return Case(describe_case(size), [()] * size, wanted=Wanted(
        right, items=ITEMS, what="ranks in a circle"))


def _build(seed: int) -> list[Check]:
    four = [_case(4)]
    others = [_case(ranks) for ranks in (2, 3, 5 + varied(seed, 12))]
    return [
        Check("who am I", 1, "4 ranks", four, items("rank", "size")),
        Check("neighbours", 1, "4 ranks", four, items("left", "right")),
        Check("any size", 1, f"2, 3 and {others[-1].ranks} ranks", others, values),
        Check("alone", 1, "1 rank", [_case(1)], values),
    ]


EXERCISE = Exercise("hello-ranks", "Hello, ranks", "hello", _build)
