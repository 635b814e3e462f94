"""Chapter 00: this rank, the number of ranks, the neighbours"""

from __future__ import annotations

from dtlab.grading.case import Case, Outcome, describe_case
from dtlab.grading.exercise import Check, Exercise, Verdict


def _case(ranks: int) -> Case:
    return Case(describe_case(ranks), [()] * ranks)


def _expected(rank: int, size: int) -> tuple[int, ...]:
    return rank, size, (rank - 1) % size, (rank + 1) % size


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _compare(case: Case, outcome: Outcome, positions: slice) -> Verdict:
    """Compare the given positions of what every rank returned."""
    size = case.ranks
    for rank, value in enumerate(outcome.values):
        wanted = _expected(rank, size)
        if not isinstance(value, (tuple, list)) or len(value) != len(wanted):
            clue = ("Return the four numbers as one tuple: return rank, size, left, right."
                    if value is not None else "The function returns nothing: add `return`.")
            return Verdict(False, f"rank {rank} returned {_shown(value)}", str(wanted), clue=clue)
        if tuple(value)[positions] != wanted[positions]:
            return Verdict(False, f"rank {rank} returned {_shown(tuple(value))}", str(wanted),
                           clue=_clue(tuple(value), rank, size))
    return Verdict(True, "right on every rank", "(rank, size, left, right)")


def _clue(value: tuple[object, ...], rank: int, size: int) -> str:
    _, _, left, right = _expected(rank, size)
    if value[:2] == (size, rank):
        return "Rank and size are the wrong way round: return rank, size, left, right."
    if value[1] != size:
        return "Ask the communicator how many ranks there are (comm.size); it isn't always 4."
    if value[0] != rank:
        return ""
    if (value[2], value[3]) == (right, left) != (left, right):
        return "Left and right are the wrong way round: right is the next higher rank."
    return ("The ranks stand in a circle: beyond the last comes rank 0, before rank 0 comes the "
            "last. The remainder does that: (rank + 1) % size, (rank - 1) % size.")


def _build(seed: int) -> list[Check]:
    four = [_case(4)]
    others = [_case(ranks) for ranks in (2, 3, 5 + seed % 4)]
    return [
        Check("who am I", 1, "4 ranks", four, lambda c, o: _compare(c, o, slice(0, 2)),
              "comm.rank is this rank's number, comm.size how many there are."),
        Check("neighbours", 1, "4 ranks", four, lambda c, o: _compare(c, o, slice(2, 4))),
        Check("any size", 1, f"2, 3 and {others[-1].ranks} ranks", others,
              lambda c, o: _compare(c, o, slice(0, 4))),
        Check("alone", 1, "1 rank", [_case(1)], lambda c, o: _compare(c, o, slice(0, 4)),
              "A rank that is alone is its own neighbour on both sides."),
    ]


EXERCISE = Exercise("hello-ranks", "Hello, ranks", "00", 1, "hello", _build)
