"""Chapter 10: gradients accumulated over unequal micro-batches, judged by values and traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dtlab.comm import Comm
from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._data_parallel import F64, judge_values
from dtlab.grading.exercises._standard import COLLECTIVES, sent_at_most


def mean_gradient(samples: Tensor) -> Tensor:
    """What the learner's function gets: of samples (b, n), the gradient (n,) of a mean loss."""
    return torch.sin(samples).mean(0)


def run_batches(average: Callable[..., Any], comm: Comm, batches: list[Tensor], length: int) -> Any:
    """In the sandbox."""
    return [average(comm, batches, mean_gradient, length)]


def _values(case: Case, outcome: Outcome) -> Verdict:
    ranks = [args[0] for args in case.args]
    length = case.args[0][1]
    zero = torch.zeros(length, dtype=F64)
    means = [[mean_gradient(b) for b in batches] for batches in ranks]
    every = torch.cat([b for batches in ranks for b in batches])
    total = torch.sin(every).sum(0)
    own = [torch.stack(m).mean(0) if m else zero for m in means]
    weighted = [torch.sin(torch.cat(b)).mean(0) if b else zero for b in ranks]
    p, micro = len(ranks), [g for m in means for g in m]
    return judge_values(case, outcome.values, [total / len(every)], "the mean over all samples", {
        "An average of averages: a sample in a small micro-batch counts more. Weigh each gradient "
        "with its number of samples, and divide the sum by all samples of all ranks.":
            lambda r: [torch.stack(own).mean(0)],
        "Each rank's mean is right, but a rank with few samples counts as much as one with many: "
        "add up sums, and divide by all samples of all ranks.":
            lambda r: [torch.stack(weighted).mean(0)],
        "All micro-batches count alike, whatever their size: weigh each with its samples.":
            lambda r: [torch.stack(micro).mean(0)],
        "This is the sum over all samples: divide by their number.": lambda r: [total],
        "Divided by the samples of this rank only: add up the counts of all ranks, too.":
            lambda r: [total / max(sum(map(len, ranks[r])), 1)],
        "Only the last micro-batch of each rank counts: add the gradients up.":
            lambda r: [sum((m[-1] * len(b[-1]) for m, b in zip(means, ranks, strict=True) if m),
                           zero) / len(every)],
        "The gradients are divided by the number of ranks: the sum over all ranks, divided by all "
        "samples, is the mean already.": lambda r: [total / len(every) / p],
    }, "Add up samples · gradient over a rank's micro-batches, and the samples; sum both over the "
        "ranks, and divide one by the other.")


def _traffic(case: Case, outcome: Outcome) -> Verdict:
    p, length = case.ranks, case.args[0][1]
    allowed = 2 * (p - 1) * (-(-(length + 1) // p) * 8 + 8)  # the count may travel alone
    return sent_at_most(case, outcome, allowed, "one all-reduce", (
        "The gradients are reduced more than once. Add up on each rank first; one all-reduce of "
        "the sums, after the last micro-batch, is enough."))


def _build(seed: int) -> list[Check]:
    def case(tried: str, length: int, *sizes: list[int], **more: Any) -> Case:
        random = torch.Generator().manual_seed(seed)
        args = [([torch.randn(b + seed % 2, length, generator=random, dtype=F64) for b in batches],
                 length) for batches in sizes]
        return Case(f"{len(sizes)} ranks, {tried}", args, harness=run_batches, **COLLECTIVES,
                    **more)

    equal = [case("equal micro-batches", 8, [4, 4], [4, 4]),
             case("equal micro-batches", 12, *[[2, 2, 2]] * 4)]
    uneven = [case("unequal micro-batches", 8, [5, 2], [1, 4]),
              case("unequal ranks", 6, [3, 3], [1, 1], [2, 2]),
              case("unequal numbers of micro-batches", 9, [3, 2, 4], [1], [2, 6])]
    empty = [case("one without samples", 7, [3, 2], [], [4]), case("one sample", 5, [], [1]),
             case("one rank", 5, [2, 3])]
    large = [case("many micro-batches", 600, *[[1, 2, 3, 2, 1]] * 4),
             case("many micro-batches", 1000, *[[2, 1, 1, 3]] * 2),
             case("many micro-batches", 301, [1, 1, 2], [3], [1, 1])]
    real = [case("over Gloo", 50, [2, 3], [1], [4, 1, 1], gloo=True)]
    return [
        Check("equal", 2, "equal micro-batches", equal, _values),
        Check("unequal", 2, "unequal micro-batches and ranks", uneven, _values),
        Check("empty", 1, "ranks without samples; one rank", empty, _values,
              "A rank without micro-batches must take part in the all-reduce all the same, with "
              "zeros of the given length, and a count of 0."),
        Check("traffic", 2, "bytes that a rank sends", large, _traffic, provided=_values),
        Check("real", 1, "3 ranks over Gloo", real, _values),
    ]


EXERCISE = Exercise("accumulated-average", "Accumulation", "10", 3, "accumulate", _build)
