"""Chapter 04: into how many segments should a chain cut its vector?"""

from __future__ import annotations

import math

from dtlab.cost.broadcast_reduce import chain_form
from dtlab.grading.case import Case, Outcome, counted
from dtlab.grading.draws import scale
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.standard import always

TOLERANCE = 0.01  # of the best time
ETHERNET, NVLINK = (20e-6, 0.8e-9), (9e-6, 1 / 150e9)


def chain_s(ranks: int, nbytes: int, alpha: float, beta: float, segments: int) -> float:
    """Seconds that the chain takes: (p−2+k)(α + nβ/k), cut between bytes."""
    return chain_form(ranks, nbytes, 1, segments).seconds(alpha, beta, 0.0)


def best_s(ranks: int, nbytes: int, alpha: float, beta: float) -> tuple[int, float]:
    """The best number of segments and its time, by trying all near where the formula has its
    minimum (and 1: it may lie below)."""
    middle = math.sqrt(max(ranks - 2, 0) * nbytes * beta / alpha)
    near = {1, *range(max(1, int(middle * 0.9)), int(middle * 1.1) + 3)}
    return min(((k, chain_s(ranks, nbytes, alpha, beta, k)) for k in near),
               key=lambda pair: pair[1])


def _judge(case: Case, outcome: Outcome) -> Verdict:
    (k,), (best, best_time) = outcome.values, best_s(*case.args[0])
    expected = f"≤ {1 + TOLERANCE:g} × {best_time:.4g} s, as with {best}"
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        return Verdict(False, f"{k!r}"[:60], f"{expected} segments",
                       evidence="no number of segments")
    ranks, nbytes, alpha, beta = case.args[0]
    took = chain_s(ranks, nbytes, alpha, beta, k)
    return Verdict(took <= best_time * (1 + TOLERANCE), f"{counted(k, 'segment')}: {took:.4g} s",
                   expected, evidence=k)


def _build(seed: int) -> list[Check]:
    def case(ranks: int, nbytes: int, machine: tuple[float, float]) -> Case:
        alpha, beta = (x * scale(seed, ranks, nbytes, x) for x in machine)
        nbytes = int(nbytes * scale(seed, ranks, nbytes))
        text = f"{ranks} ranks, {nbytes:,} B, α = {alpha * 1e6:.4g} µs, β = {beta * 1e9:.3g} ns"
        return Case(text, [(ranks, nbytes, alpha, beta)], comm=False)

    long = [case(16, 100_000_000, ETHERNET), case(8, 10_000_000, NVLINK),
            case(64, 1_000_000, ETHERNET), case(1000, 50_000_000, NVLINK)]
    short = [case(3, 150_000, ETHERNET), case(4, 60_000, ETHERNET), case(3, 11_300_000, NVLINK)]
    edges = [case(2, 100_000_000, ETHERNET), case(16, 4, ETHERNET), case(2, 4, NVLINK),
             case(8, 0, ETHERNET), case(5, 1000, NVLINK)]
    return [
        Check("long vectors", 2, "8 to 1000 ranks, 1 to 100 MB", long, _judge),
        Check("short chains", 1, "3 and 4 ranks", short, _judge),
        Check("edges", 1, "2 ranks; a few bytes; none", edges, _judge, requires=always),
    ]


EXERCISE = Exercise("best-segments", "The best number of segments", "best_segments", _build)
