"""Chapter 10: gradients accumulated over unequal micro-batches, judged by values and traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.grading.case import Case, Wanted
from dtlab.grading.draws import normals, varied
from dtlab.grading.exercise import WITH_COLLECTIVES, Check, Exercise
from dtlab.grading.standard import COLLECTIVES, on_gloo, one_mean, sum_bytes, values


def mean_gradient(samples: Tensor) -> Tensor:
    """Return the gradient (n,) of a mean loss over samples (b, n), for the learner's function."""
    return torch.sin(samples).mean(0)


def run_batches(average: Callable[..., Any], comm: Comm, batches: list[Tensor], length: int) -> Any:
    """In the sandbox, run `average` with a gradient that has room for one micro-batch at a time."""
    most = max(map(len, batches), default=0)

    def gradient(samples: Tensor) -> Tensor:
        if len(samples) > most:
            raise ConfigError(f"gradient got {len(samples)} samples, and the largest micro-batch "
                              f"has {most}: give it one micro-batch after the other")
        return mean_gradient(samples)

    return average(comm, batches, gradient, length)


def _build(seed: int) -> list[Check]:
    def case(tried: str, length: int, *sizes: list[int], **more: Any) -> Case:
        more_b = varied(seed, 4, tried, length)
        ranks = [normals((seed, tried, length, rank), *((b + more_b, length) for b in batches))
                 for rank, batches in enumerate(sizes)]
        right = mean_gradient(torch.cat([b for batches in ranks for b in batches]))
        wanted = Wanted([right] * len(ranks), what="the mean over all samples", rtol=1e-12,
                        least_bytes=sum_bytes(len(ranks), right.nbytes, sum(map(bool, ranks))))
        return Case(f"{len(sizes)} ranks, {tried}", [(batches, length) for batches in ranks],
                    wanted=wanted, harness=run_batches, **COLLECTIVES, **more)

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
    return [
        Check("equal", 2, "equal micro-batches", equal, values),
        Check("unequal", 2, "unequal micro-batches and ranks", uneven, values),
        Check("empty", 1, "ranks without samples; one rank", empty, values),
        Check("traffic", 2, "bytes that a rank sends", large,
              one_mean(lambda case: case.args[0][1], "one all-reduce"), values),
        on_gloo(case("over Gloo", 50, [2, 3], [1], [4, 1, 1], gloo=True)),
    ]


EXERCISE = Exercise("accumulated-average", "Accumulation", "accumulate", _build,
                    library=WITH_COLLECTIVES)
