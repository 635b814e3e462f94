"""Chapter 05: the ring, judged by what it moves and what it keeps, not only by its sums."""

from __future__ import annotations

from dtlab.grading.case import Case, Outcome
from dtlab.grading.draws import varied
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.standard import (
    F32,
    LARGE_N,
    any_dtype,
    memory,
    ring_bytes,
    rounds_at_most,
    sent_at_most,
    summing_case,
    values,
)


def _rounds(case: Case, outcome: Outcome) -> Verdict:
    """2(p−1) at most, and each rank sends to its neighbours only, as in a ring (or in two, the one
    against the other)."""
    pairs = {(m.src, m.dst) for m in outcome.trace.transfers}
    if len(pairs) > 2 * case.ranks:
        return Verdict(False, f"messages between {len(pairs)} pairs of ranks",
                       "between neighbours of a ring only", evidence=sorted(pairs))
    return rounds_at_most(lambda case: 2 * (case.ranks - 1), "2(p−1)")(case, outcome)


def _build(seed: int) -> list[Check]:
    def cases(*what: tuple[int, int]) -> list[Case]:
        """Return cases with other sizes for other seeds, but as divisible ones."""
        return [summing_case(p, n + varied(seed, 5, p, n) * p * (n >= p), F32, seed)
                for p, n in what]

    def chunk(case: Case) -> int:
        return int(-(-case.facts["n"] // case.ranks) * case.facts["item"])

    plain = cases((4, 8), (2, 4), (8, 32))
    any_p = cases((1, 5), (3, 6), (5, 10), (6, 12), (7, 7), (9, 18), (13, 26))
    any_n = cases((4, 10), (2, 5), (8, 27), (4, 3), (8, 1), (4, 0), (3, 7), (9, 30), (5, 3))
    timed = [*plain, *any_n[:6], *any_p[1:]]
    return [
        Check("sums", 2, "2, 4, 8 ranks", plain, values),
        Check("any p", 1, "1, 3, 5, 6, 7, 9, 13 ranks", any_p, values),
        Check("any n", 1, "n not a multiple of p; n < p; n = 0", any_n, values),
        any_dtype(lambda dtype: summing_case(4, 8, dtype, seed)),
        Check("bytes", 2, "2 to 13 ranks", timed, sent_at_most(
            lambda case: ring_bytes(case.ranks, case.facts["n"], case.facts["item"]),
            "2(p−1)·⌈n/p⌉ elements"), values),
        Check("rounds", 1, "2 to 13 ranks, simulated", timed, _rounds, values),
        *memory("4 ranks, 192000 × float32", chunk, "one chunk",
                [summing_case(4, 192_000, F32, seed, meter=True)],
                [summing_case(p, n, F32, seed, gloo=True) for p, n in ((4, 1_000), (2, LARGE_N))]),
    ]


EXERCISE = Exercise("ring-all-reduce", "Ring all-reduce", "ring_all_reduce", _build)
