"""Chapter 10: gradients averaged in buckets, judged by values, messages and what is in a bucket."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from dtlab.grading.case import Case, Outcome, counted, describe_case
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises import _data_parallel as shared
from dtlab.grading.exercises._data_parallel import F32, F64, sent_in_rings
from dtlab.grading.exercises._standard import COLLECTIVES


def _buckets(sizes: list[int], least: int) -> list[int]:
    """Elements in each bucket: from the last tensor on, closed once it holds `least`."""
    closed, now = [], 0
    for size in reversed(sizes):
        now += size
        if now >= least:
            closed.append(now)
            now = 0
    return closed + [now] * (now > 0)


def _values(case: Case, outcome: Outcome) -> Verdict:
    p, mine, least = case.ranks, [args[0] for args in case.args], case.args[0][1]
    sums = shared.summed(mine)
    last = _buckets([len(s) for s in sums], least)[-1]  # that of the first gradients

    def without_last(rank: int) -> list[torch.Tensor]:
        begins = accumulate((len(s) for s in sums), initial=0)
        return [own if begin < last < least else total / p
                for begin, total, own in zip(begins, sums, mine[rank], strict=False)]

    return shared.judge_values(case, [after[0] for after in outcome.after], [s / p for s in sums],
                               "the average over all ranks", {
        "The gradients are summed, but not averaged: divide by the number of ranks, or op=\"avg\".":
            lambda r: sums,
        "The average is divided by the number of ranks once more: op=\"avg\" does it by itself.":
            lambda r: [s / p**2 for s in sums],
        "The last bucket is lost: what is left when the loop ends, though not full, must be "
        "reduced, too.": without_last,
        "Nothing has changed in `grads`: copy the averages back out of the bucket, in place.":
            lambda r: mine[r],
    }, "Join a bucket with torch.cat, average it, and copy each part back into its own gradient: "
        "split it by the lengths of the gradients, in the order in which they were joined.")


def _messages(case: Case, outcome: Outcome) -> Verdict:
    grads, least = case.args[0]
    allowed = len(_buckets([len(g) for g in grads], least))
    rings = len(sent_in_rings(outcome, case.ranks))
    return Verdict(rings == allowed, counted(rings, "all-reduce"),
                   f"{allowed}, one for each bucket", rounds=f"{rings} / {allowed}", clue=(
        "Each gradient travels alone: join them (torch.cat) until a bucket holds `least` elements."
        if rings == len(grads) else
        "Everything travels at once: close a bucket as soon as it holds `least` elements."
        if rings == 1 else
        "A bucket is closed once it holds at least `least` elements, and not before."))


def _order(case: Case, outcome: Outcome) -> Verdict:
    grads, least = case.args[0]
    sizes, came = [len(g) for g in grads], sent_in_rings(outcome, case.ranks)

    def rings(sizes: list[int]) -> list[int]:
        return [2 * (case.ranks - 1) * n * grads[0].itemsize for n in _buckets(sizes, least)]

    if came == rings(sizes):
        return Verdict(True, "last gradients first", "last gradients first")
    clue = ("The buckets begin with the first gradient. Backward computes the last layer's first: "
            "go through `grads` from its end." if came == rings(sizes[::-1]) else
            "Fill the buckets from the end of `grads`; close each once it holds `least` elements.")
    return Verdict(False, "other buckets", "from the last gradient to the first", clue=clue)


def _build(seed: int) -> list[Check]:
    def case(ranks: int, sizes: list[int], least: int, dtype: torch.dtype = F64, **more: Any
             ) -> Case:
        sizes = [n + (seed % 3 if n > 1 else 0) for n in sizes]
        args = [(shared.random_tensors(sizes, 100 * seed + r, dtype), least) for r in range(ranks)]
        return Case(describe_case(ranks, sum(sizes), dtype), args, **COLLECTIVES, **more)

    plain = [case(2, [8, 4, 12, 6], 10), case(4, [16, 16, 16, 16], 32), case(3, [5, 40, 7, 3], 12)]
    odd = [case(3, [4, 4, 4], 5), case(5, [1, 2, 3, 4, 5], 6), case(4, [3], 100),
           case(2, [7, 1, 1, 1], 1), case(4, [30, 2, 9, 11], 13, F32)]
    return [
        Check("averages", 2, "2 to 4 ranks", plain, _values, "A bucket's parts have the lengths "
              "of its gradients: `bucket.split([len(g) for g in ...])`."),
        Check("any sizes", 1, "1 to 5 gradients, a bucket that is never full, float32", odd,
              _values, "It fails where the last bucket isn't full, or a gradient is small."),
        Check("messages", 2, "one all-reduce for each bucket", [*plain, *odd], _messages,
              provided=_values),
        Check("order", 2, "what is in which bucket", [*plain, *odd], _order, provided=_values),
        Check("real", 1, "3 ranks over Gloo", [case(3, [100, 20, 33], 50, gloo=True)], _values),
    ]


EXERCISE = Exercise("bucketed-average", "Buckets", "10", 1, "average_in_buckets", _build)
