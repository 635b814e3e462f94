"""Chapter 01: gradients of unequal shards, averaged so that they agree with one device."""

from __future__ import annotations

import torch
from torch import Tensor

from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._data_parallel import F64, judge_values


def _values(case: Case, outcome: Outcome) -> Verdict:
    gradients = [args[0] for args in case.args]
    samples = [args[1] for args in case.args]
    p, every = case.ranks, sum(samples)
    sums = [g * n for g, n in zip(gradients, samples, strict=True)]
    total = torch.stack(sums).sum(0)
    own, filled = [max(n, 1) for n in samples], max(sum(n > 0 for n in samples), 1)
    return judge_values(case, [[value] for value in outcome.values], [total / every],
                        "the gradient of the mean over all samples", {
        "An average of averages: a sample on a small shard counts more. Weight each gradient by "
        "its number of samples, and divide the sum by all samples.":
            lambda r: [torch.stack(gradients).mean(0)],
        "An average over the ranks that have samples; but their shards differ: weight each "
        "gradient by its number of samples.": lambda r: [torch.stack(gradients).sum(0) / filled],
        "The gradients are added up, but not averaged.": lambda r: [torch.stack(gradients).sum(0)],
        "Each rank returns its own gradient: the others' never came.": lambda r: [gradients[r]],
        "This is the sum over all samples: divide by their number.": lambda r: [total],
        "The sum is divided by the number of ranks: divide by all samples.": lambda r: [total / p],
        "Divided by this rank's samples: add up those of all ranks, too.":
            lambda r: [total / own[r]],
        "Each rank divides by its own number of samples, times the ranks. Divide by the samples of "
        "all ranks: `all_reduce` their number, too.": lambda r: [total / (own[r] * p)],
    }, "Sum samples · gradient over the ranks, and the samples, too; divide one by the other.")


def _unchanged(case: Case, outcome: Outcome) -> Verdict:
    for rank, (before, after) in enumerate(zip(case.args, outcome.after, strict=True)):
        if not torch.equal(before[0], after[0]):
            return Verdict(False, f"rank {rank}'s gradient was changed", "as it was",
                           clue="`all_reduce` works in place: give it a new tensor, such as "
                                "`samples * gradient`.")
    return Verdict(True, "as it was", "as it was")


def _bytes(case: Case, outcome: Outcome) -> Verdict:
    n, p = len(case.args[0][0]), case.ranks
    allowed = 2 * (p - 1) * (-(-(n + 1) // p) * 8 + 8)  # the count may travel alone
    most = max(outcome.trace.sent_bytes(rank) for rank in range(p))
    text = f"{most:,} / {allowed:,}"
    clue = ("" if most <= allowed else "More is sent than an all-reduce of one gradient and a "
            "number takes: don't gather all gradients, add them up.")
    return Verdict(most <= allowed, f"{most:,} B a rank", f"≤ {allowed:,} B", text, clue=clue)


def _build(seed: int) -> list[Check]:
    def case(tried: str, n: int, *samples: int, gloo: bool = False) -> Case:
        random = torch.Generator().manual_seed(100 * seed + n)
        args: list[tuple[Tensor, int]] = [
            (torch.randn(n, generator=random, dtype=F64) * (count > 0), count)
            for count in samples]
        return Case(f"{len(samples)} ranks, {tried}", args, library=True, latency_s=1e-6,
                    bandwidth_Bps=1e9, gloo=gloo)

    k = seed % 3
    equal = [case("equal shards", 5, 8, 8), case("equal shards", 12, *[3 + k] * 4)]
    uneven = [case("unequal shards", 6, 5, 2 + k), case("unequal shards", 9, 1, 7, 3),
              case("unequal shards", 4, 4, 4, 4, 4 + k + 1)]
    empty = [case("a rank without samples", 7, 3, 0, 2), case("one rank", 3, 4 + k),
             case("one sample", 5, 0, 1)]
    large = [case("large gradients", 4000, 5, 2, 9, 1), case("large gradients", 3001, 1, 2, 4)]
    return [
        Check("equal shards", 1, "2 and 4 ranks", equal, _values),
        Check("unequal shards", 3, "2 to 4 ranks", uneven, _values),
        Check("empty shards", 1, "ranks without samples; one rank", empty, _values,
              "It fails where a rank has no sample: it must take part, with a weight of 0."),
        Check("unchanged", 1, "the gradient that came in", [*equal, *uneven], _unchanged,
              provided=_values),
        Check("bytes", 1, "bytes that a rank sends", large, _bytes, provided=_values),
        Check("real", 1, "3 ranks over Gloo", [case("over Gloo", 50, 2, 5, 1, gloo=True)], _values),
    ]


EXERCISE = Exercise("unequal-shards", "Unequal shards", "01", 1, "mean_gradient", _build)
