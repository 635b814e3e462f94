"""The time that a schedule takes, and the activations that it holds meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from dtlab.checks import check_amount
from dtlab.errors import ConfigError
from dtlab.parallel.pipeline.action import Action, Rows, ranks_of, run_in_order

Spans = list[tuple[Action, float, float]]  # of one rank: action, start, end


@dataclass(frozen=True)
class Timing:
    """The timing of one step; lists are by rank, times in seconds.

    elapsed: from the first action's start to the last one's end. longest: the longest time from one
    rank's first action to its last: shorter than `elapsed` where ranks end one after the other, and
    what a step costs in a row of many. bubble: `longest` less the work of a rank, m(F+B).
    busy, start, end: of each rank. spans: (action, start, end) of each action.
    in_flight: the most micro-batches that are forward but not yet backward (B or I); waiting: the
    most that are backward but wait for W; held: the most of both, which is what activations occupy.
    A chunk counts as 1/v.
    """

    elapsed: float
    longest: float
    bubble: float
    busy: list[float]
    start: list[float]
    end: list[float]
    in_flight: list[float]
    waiting: list[float]
    held: list[float]
    spans: list[Spans]

    @property
    def bubble_fraction(self) -> float:
        """The share of the time: (p−1)/(m+p−1) for GPipe and 1F1B. The zero-bubble paper's
        "bubble rate" (Qi et al. 2024, §4.2)."""
        return self.bubble / self.longest

    @property
    def bubble_ratio(self) -> float:
        """The bubble against the ideal time m(F+B): (p−1)/m for GPipe and 1F1B."""
        return self.bubble / (self.longest - self.bubble)


def spans_of(rows: Rows, stages: int, seconds: Callable[[Action], float], comm: float = 0.0
             ) -> list[Spans]:
    """Each rank does its actions in order, each as soon as what it needs has arrived; from one that
    can't ever run on, a rank's are left out."""
    rank_of = ranks_of(rows)
    spans: list[Spans] = [[] for _ in rows]
    ends: dict[Action, float] = {}
    for rank, number in run_in_order(rows, stages):
        action = rows[rank][number]
        ready = spans[rank][-1][2] if spans[rank] else 0.0
        for one in action.needs(stages):
            arrived = [ends[a] + (comm if rank_of[a.stage] != rank else 0.0)
                       for a in one if a in ends]
            ready = max(ready, min(arrived))
        ends[action] = ready + seconds(action)
        spans[rank].append((action, ready, ends[action]))
    return spans


def time_of(rows: Rows, stages: int, micro_batches: int, F: float, B: float, W: float, comm: float
            ) -> Timing:
    """The timing of `rows`, of which nothing is missing."""
    for name, value in (("F", F), ("B", B), ("W", W), ("comm", comm)):
        check_amount(f"time: {name}", value, " seconds")
    if W > B:
        raise ConfigError(f"time: B={B!r} is all of backward, and can't be less than W={W!r}")
    if not rows or not all(rows) or not F + B:
        raise ConfigError("time: each rank needs something to do, and F or B more than 0 seconds")
    took = {"F": F, "B": B, "I": B - W, "W": W}
    rank_of = ranks_of(rows)
    share = [list(rank_of.values()).count(rank) for rank in range(len(rows))]
    spans = spans_of(rows, stages, lambda a: took[a.kind] / share[rank_of[a.stage]], comm)
    start, end = [row[0][1] for row in spans], [row[-1][2] for row in spans]
    longest = max(last - first for first, last in zip(start, end, strict=True))

    def most(**change: int) -> list[float]:
        """Return each rank's highest running sum of `change`, by an action's kind."""
        return [max(accumulate(change.get(action.kind, 0) for action in row)) / chunks
                for row, chunks in zip(rows, share, strict=True)]

    return Timing(
        max(end) - min(start), longest, longest - micro_batches * (F + B),
        [sum(last - first for _, first, last in row) for row in spans], start, end,
        in_flight=most(F=1, B=-1, I=-1), waiting=most(I=1, W=-1), held=most(F=1, B=-1, W=-1),
        spans=spans)
