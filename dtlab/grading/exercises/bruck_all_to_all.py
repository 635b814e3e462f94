"""Chapter 04: a part from every rank to every rank, in ⌈lg p⌉ rounds."""

from __future__ import annotations

import torch

from dtlab.grading.case import ANY, Case, Wanted, describe_case
from dtlab.grading.draws import numbers, varied, widest
from dtlab.grading.exercise import Check, Exercise
from dtlab.grading.exercises.shift import call_and_overwrite
from dtlab.grading.standard import (
    BF16,
    F32,
    F64,
    I64,
    lg_ceil,
    on_gloo,
    rounds_at_most,
    sent_at_most,
    values,
)


def _case(ranks: int, shape: tuple[int, ...], dtype: torch.dtype = F32, seed: int = 0,
          gloo: bool = False) -> Case:
    parts = [numbers((seed, ranks, shape, dtype, r), (ranks, *shape), dtype,
                     widest(seed, dtype, 99)) for r in range(ranks)]
    part = parts[0][0].nbytes
    wanted = Wanted([(torch.stack([p[rank] for p in parts]), parts[rank].clone(),
                      True if part else ANY) for rank in range(ranks)],
                    items=("result", "parts", "another tensor than parts"),
                    what="row s is rank s's parts[r]; parts as it was",
                    least_bytes=ranks * (ranks - 1) * part)
    return Case(describe_case(ranks, (ranks, *shape), dtype), [(p,) for p in parts], gloo=gloo,
                harness=call_and_overwrite, wanted=wanted, facts={"part": part})


def _build(seed: int) -> list[Check]:
    n = 3 + varied(seed, 5)
    plain = [_case(p, (n,), seed=seed) for p in (4, 2, 8)]
    any_p = [_case(p, (n,), seed=seed) for p in (1, 3, 5, 6, 7, 9, 13)]
    kinds = [_case(4, shape, dtype, seed) for shape, dtype in (
        ((2, 3), F32), ((), F32), ((0,), F32), ((n,), F64), ((n,), I64), ((n,), BF16))]
    timed = [*plain, *any_p[1:]]
    return [
        Check("values", 2, "2, 4, 8 ranks", plain, values),
        Check("any p", 2, "1, 3, 5, 6, 7, 9, 13 ranks", any_p, values),
        Check("any parts", 1, "2-d parts, numbers, empty; float64, int64, bfloat16", kinds, values),
        Check("rounds", 2, "2 to 13 ranks, simulated", timed,
              rounds_at_most(lambda case: lg_ceil(case.ranks), "⌈lg p⌉"), values),
        Check("bytes", 2, "2 to 13 ranks", timed, sent_at_most(
            lambda case: case.ranks * lg_ceil(case.ranks) // 2 * case.facts["part"],
            "n/2·⌈lg p⌉"), values),
        on_gloo(_case(4, (250,), seed=seed, gloo=True)),
    ]


EXERCISE = Exercise("bruck-all-to-all", "Bruck's all-to-all", "bruck_all_to_all", _build)
