"""Chapter 01: gradients of unequal shards, averaged so that they agree with one device."""

from __future__ import annotations

import torch

from dtlab.grading.case import Case, Outcome, Wanted
from dtlab.grading.compare import difference
from dtlab.grading.draws import normals, varied
from dtlab.grading.exercise import WITH_COLLECTIVES, Check, Exercise, Verdict
from dtlab.grading.standard import COLLECTIVES, on_gloo, one_mean, sum_bytes, values


def _unchanged(case: Case, outcome: Outcome) -> Verdict:
    wrong = difference("the gradient", [after[0] for after in outcome.args_after],
                       [args[0] for args in case.args])
    return Verdict(wrong is None, "changed" if wrong else "as it was", "as it was")


def _build(seed: int) -> list[Check]:
    def case(tried: str, n: int, *samples: int, gloo: bool = False) -> Case:
        grads = [normals((seed, n, samples, rank), n)[0] * (count > 0)
                 for rank, count in enumerate(samples)]
        total = torch.stack([g * c for g, c in zip(grads, samples, strict=True)]).sum(0)
        wanted = Wanted([total / sum(samples)] * len(samples), rtol=1e-12,
                        what="the gradient of the mean over all samples",
                        least_bytes=sum_bytes(len(samples), total.nbytes, sum(map(bool, samples))))
        return Case(f"{len(samples)} ranks, {tried}", list(zip(grads, samples, strict=True)),
                    wanted=wanted, gloo=gloo, **COLLECTIVES)

    k = varied(seed, 20)
    equal = [case("equal shards", 5, 8, 8), case("equal shards", 12, *[3 + k] * 4)]
    uneven = [case("unequal shards", 6, 5, 2 + k), case("unequal shards", 9, 1, 7, 3),
              case("unequal shards", 4, 4, 4, 4, 4 + k + 1)]
    empty = [case("a rank without samples", 7, 3, 0, 2), case("one rank", 3, 4 + k),
             case("one sample", 5, 0, 1)]
    large = [case("large gradients", 4000, 5, 2, 9, 1), case("large gradients", 3001, 1, 2, 4)]
    return [
        Check("equal shards", 1, "2 and 4 ranks", equal, values),
        Check("unequal shards", 3, "2 to 4 ranks", uneven, values),
        Check("empty shards", 1, "ranks without samples; one rank", empty, values),
        Check("unchanged", 1, "the gradient that came in", [*equal, *uneven], _unchanged, values),
        Check("bytes", 1, "bytes that a rank sends", large,
              one_mean(lambda case: len(case.args[0][0]),
                       "one all-reduce of the gradient and a number"), values),
        on_gloo(case("over Gloo", 50, 2, 5, 1, gloo=True)),
    ]


EXERCISE = Exercise("unequal-shards", "Unequal shards", "mean_gradient", _build,
                    library=WITH_COLLECTIVES)
