"""Chapter 05: halving and doubling, judged by its bytes and its rounds, for any number of ranks."""

from __future__ import annotations

from dtlab.grading.case import Case, Outcome
from dtlab.grading.draws import varied
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.standard import (
    F32,
    LARGE_N,
    MESSAGE_BYTES,
    any_dtype,
    bytes_sent,
    memory,
    rounds_at_most,
    summing_case,
    values,
)


def _core(ranks: int) -> tuple[int, int, int]:
    """The largest power of two that is at most `ranks`, its logarithm, the ranks beyond it."""
    lg = ranks.bit_length() - 1
    return 1 << lg, lg, ranks - (1 << lg)


def _bytes(case: Case, outcome: Outcome) -> Verdict:
    """The bound in all; of one rank, 2(p′−1)⌈n/p′⌉ elements, and one vector more if ranks fold."""
    core, lg, extra = _core(case.ranks)
    n, item = case.facts["n"], case.facts["item"]
    piece = max(-(-n // core) * item, MESSAGE_BYTES)
    allowed = 2 * (core - 1) * piece + (n * item if extra else 0)
    least = case.wanted.least_bytes if case.wanted else 0
    if n // core * item < MESSAGE_BYTES:  # such pieces count more than they hold
        least += 2 * (core * lg + extra) * MESSAGE_BYTES
    sent = [bytes_sent(outcome, rank) for rank in range(case.ranks)]
    most = max(sent)
    if most <= allowed and sum(sent) > least:
        return Verdict(False, f"{sum(sent):,} B in all", f"{least:,} B in all", evidence=sent)
    return Verdict(most <= allowed, f"rank {sent.index(most)} sent {most:,} B",
                   f"≤ 2(p′−1)/p′·n{' + n' * (extra > 0)} = {allowed:,} B",
                   f"{most:,} / {allowed:,}", evidence=sent)


def _build(seed: int) -> list[Check]:
    def cases(*what: tuple[int, int]) -> list[Case]:
        """Return cases with other sizes for other seeds, but as divisible ones."""
        return [summing_case(p, n + varied(seed, 5, p, n) * _core(p)[0] * (n >= p), F32, seed)
                for p, n in what]

    def room(case: Case) -> int:
        """Half a vector for the first round's inbox; all of it where a rank takes in another's."""
        n = case.facts["n"]
        return int((n if _core(case.ranks)[2] else -(-n // 2)) * case.facts["item"])

    plain = cases((4, 8), (2, 4), (8, 32))
    any_p = cases((1, 4), (3, 4), (6, 8), (5, 8), (7, 8), (9, 16), (13, 16))
    uneven = cases((4, 10), (2, 5), (8, 27), (4, 3), (8, 5), (8, 1), (4, 0))
    both = cases((3, 7), (6, 9), (13, 30), (5, 3))
    timed = [*plain, *uneven[:-1], *any_p[1:], *both]
    return [
        Check("sums", 1, "2, 4, 8 ranks", plain, values),
        Check("any p", 2, "1, 3, 5, 6, 7, 9, 13 ranks", any_p, values),
        Check("any n", 1, "uneven halves; n < p; n = 0", [*uneven, *both], values),
        any_dtype(lambda dtype: summing_case(4, 8, dtype, seed)),
        Check("bytes", 2, "2 to 13 ranks", timed, _bytes, values),
        Check("rounds", 1, "2 to 13 ranks, simulated", timed, rounds_at_most(
            lambda case: 2 * _core(case.ranks)[1] + 2 * (_core(case.ranks)[2] > 0),
            "2 lg p′, and 2 for folding,"), values),
        *memory("4 and 6 ranks, 96000 × float32", room, "half of x, or all of it to fold",
                [summing_case(p, 96_000, F32, seed, meter=True) for p in (4, 6)],
                [summing_case(p, n, F32, seed, gloo=True) for p, n in ((5, 1_000), (2, LARGE_N))]),
    ]


EXERCISE = Exercise("halving-doubling", "Halving and doubling", "halving_doubling", _build)
