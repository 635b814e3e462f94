"""Chapter 04: every rank gets the root's vector, in ⌈lg p⌉ rounds."""

from __future__ import annotations

from typing import Any

from dtlab.grading.case import Case, Outcome
from dtlab.grading.draws import varied
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.standard import (
    BF16,
    F64,
    I64,
    broadcast_case,
    bytes_sent,
    lg_ceil,
    on_gloo,
    rounds_at_most,
    values,
)


def _bytes(case: Case, outcome: Outcome) -> Verdict:
    least, sent = case.wanted.least_bytes if case.wanted else 0, bytes_sent(outcome)
    return Verdict(sent == least, f"{sent:,} B in all", f"(p−1)·n = {least:,} B in all",
                   f"{sent:,} / {least:,}", evidence=sent)


def _build(seed: int) -> list[Check]:
    def case(ranks: int, n: int = -1, root: int = 0, **options: Any) -> Case:
        n = 6 + varied(seed, 7, ranks, root) if n < 0 else n
        return broadcast_case(ranks, n, root, seed=seed, **options)

    plain = [case(p) for p in (4, 2, 8)]
    any_p = [case(p) for p in (1, 3, 5, 6, 7, 9, 13)]
    roots = [case(p, root=root) for p, root in (
        (4, 1), (8, 5), (2, 1), (3, 2), (5, 3), (6, 4), (7, 1), (9, 8), (13, 6))]
    kinds = [*(case(4, dtype=dtype) for dtype in (F64, I64, BF16)), case(4, 0), case(4, 1)]
    timed = [*plain, *any_p[1:], *roots]
    return [
        Check("values", 2, "2, 4, 8 ranks, root 0", plain, values),
        Check("any p", 1, "1, 3, 5, 6, 7, 9, 13 ranks", any_p, values),
        Check("any root", 2, "2 to 13 ranks, every kind of root", roots, values),
        Check("any x", 1, "float64, int64, bfloat16; 0 and 1 elements", kinds, values),
        Check("rounds", 2, "2 to 13 ranks, simulated", timed,
              rounds_at_most(lambda case: lg_ceil(case.ranks), "⌈lg p⌉"), values),
        Check("bytes", 1, "2 to 13 ranks", timed, _bytes, values),
        on_gloo(case(4, 1000, 2, gloo=True)),
    ]


EXERCISE = Exercise("binomial-broadcast", "Binomial broadcast", "binomial_broadcast", _build)
