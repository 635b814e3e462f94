"""Chapter 04: a vector in segments down a chain of ranks, each passing on while it receives."""

from __future__ import annotations

from typing import Any

import torch

from dtlab.grading.case import Case, Outcome, counted
from dtlab.grading.draws import varied
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.standard import (
    BF16,
    F32,
    F64,
    I64,
    LARGE_N,
    broadcast_case,
    bytes_sent,
    memory,
    sent_at_most,
    values,
)

LATENCY_S, VECTOR_S = 1.0, 24.0  # of one message; of the bytes of the whole vector


def _time(case: Case, outcome: Outcome) -> Verdict:
    """(p−2+k) rounds of a message as long as the longest segment, at most."""
    p, n, (_, _, k) = case.ranks, case.facts["n"], case.args[0]
    sent = len(outcome.trace.transfers)
    if sent != (p - 1) * k:
        return Verdict(False, counted(sent, "message"), f"{(p - 1) * k}: {counted(k, 'segment')} "
                       f"down {counted(p - 1, 'link')}", evidence=sent)
    segment_s = LATENCY_S + VECTOR_S * -(-n // k) / n
    allowed, took = (p - 2 + k) * segment_s, outcome.elapsed_s
    return Verdict(took <= allowed * (1 + 1e-9), f"{took:.4g} s",
                   f"≤ p−2+k rounds of α + nβ/k: {p - 2 + k} × {segment_s:.4g} s = {allowed:.4g} s",
                   rounds=f"{took / segment_s:.3g} / {p - 2 + k}", evidence=took)


def _bytes(case: Case, outcome: Outcome) -> Verdict:
    if bytes_sent(outcome, (case.facts["root"] - 1) % case.ranks):
        return Verdict(False, "the last of the chain sends as well", "all but the last send")
    return sent_at_most(lambda case: case.facts["nbytes"], "n")(case, outcome)


def _build(seed: int) -> list[Check]:
    def case(ranks: int, n: int, root: int, k: int, dtype: torch.dtype = F32, **more: Any) -> Case:
        return broadcast_case(ranks, n, root, k, dtype=dtype, seed=seed,
                              said=f", {counted(k, 'segment')}", latency_s=LATENCY_S,
                              bandwidth_Bps=max(n * dtype.itemsize, 1) / VECTOR_S, **more)

    def segment(case: Case) -> int:
        return int(case.facts["nbytes"] // case.args[0][2])

    n = 24 + 12 * varied(seed, 6)  # divisible by the numbers of segments
    plain = [case(p, n, 0, k) for p, k in ((4, 3), (2, 4), (8, 6))]
    others = [case(p, n + extra, root, k) for p, extra, root, k in (
        (1, 0, 0, 3), (3, 0, 2, 4), (5, 0, 1, 1), (6, 1, 4, 3), (7, 0, 6, 12), (9, 5, 3, 4),
        (13, 0, 12, 2))]
    edges = [*(case(4, few, 1, 8) for few in (3, 1, 0)),
             *(case(4, 12, 0, 3, dtype) for dtype in (F64, I64, BF16))]
    timed = [*plain, *others[1:]]
    return [
        Check("values", 2, "2, 4, 8 ranks, root 0", plain, values),
        Check("any p, root, k", 2, "1 to 13 ranks, 1 to 12 segments", others, values),
        Check("edges", 1, "more segments than elements; dtypes", edges, values),
        Check("time", 3, "2 to 13 ranks, simulated", timed, _time, values),
        Check("bytes", 1, "2 to 13 ranks", timed, _bytes, values),
        *memory("4 ranks, 192000 × float32, 8 segments", segment, "one segment",
                [case(4, 192_000, 0, 8, meter=True)],
                [case(4, 1000, 2, 5, gloo=True), case(2, LARGE_N, 0, 8, gloo=True)]),
    ]


EXERCISE = Exercise("pipelined-chain", "Pipelined chain", "chain_broadcast", _build)
