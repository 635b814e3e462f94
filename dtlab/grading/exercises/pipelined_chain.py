"""Chapter 04: a vector in segments down a chain of ranks, each passing on while it receives."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from dtlab.grading.case import Case, Outcome, counted
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises import _standard as standard

ERRORS = {"receives into the tensor that it is sending": (
    "You send segment i in the round in which it is still coming. Send segment i − 1, which you "
    "have."), **standard.NO_SUCH_PIECE}
LATENCY_S, VECTOR_S = 1.0, 24.0  # of one message; of the bytes of the whole vector


def _clue(case: Case, outcome: Outcome, rank: int) -> str:
    x, wanted = outcome.after[rank][0], case.facts["wanted"]
    if case.facts["root"] and all(torch.equal(y, case.args[0][0]) for y, *_ in outcome.after):
        return ("Every rank has rank 0's x. A rank's place in the chain is "
                "me = (comm.rank - root) % p.")
    if torch.equal(x, case.args[rank][0]):
        return f"Rank {rank} received nothing: its x is unchanged."
    if x[0] == wanted[0] and x[-1] != wanted[-1]:
        return "The end of x is missing. x.tensor_split(segments) loses none; pass all of them on."
    return ("Some segments are not the root's. Send segment i only after it has come: in round i, "
            "receive segment i while you send segment i − 1.")


_values = partial(standard.judge_broadcast, clue=_clue)


def _time(case: Case, outcome: Outcome) -> Verdict:
    """(p−2+k) rounds of a message as long as the longest segment, at most."""
    p, n, (_, root, k) = case.ranks, case.facts["n"], case.args[0]
    segment_s = LATENCY_S + VECTOR_S * -(-n // k) / n
    allowed, took = (p - 2 + k) * segment_s, outcome.elapsed_s
    sent = [message for message in outcome.trace.transfers if message.src == root]
    second = (root + 1) % p
    came_s = max((m.end_s for m in outcome.trace.transfers if m.dst == second), default=math.inf)
    left_s = min((m.start_s for m in outcome.trace.transfers if m.src == second), default=0.0)
    if len(sent) > k:
        clue = (f"x goes out in {len(sent)} messages. x.tensor_split(segments) makes `segments` "
                "pieces of it; x.split(m) makes pieces of m elements.")
    elif len(sent) < k:
        clue = "It takes as long as with a single segment: cut x into `segments` and send each."
    elif any(after.start_s < before.end_s - 1e-9 for before, after in pairwise(sent)):
        clue = ("Several segments are under way at once. They share the port, so that the first "
                "arrives late: let one follow the other.")
    elif left_s >= came_s - 1e-9:
        clue = ("Each rank waits for all of x before it passes anything on. Pass segment i on as "
                "soon as it has come, while segment i + 1 arrives.")
    else:
        clue = ("Receiving and sending take turns. Ports are full duplex: post both together, "
                "comm.exchange(Recv(segment i, behind), Send(segment i − 1, ahead)).")
    return Verdict(took <= allowed * (1 + 1e-9), f"{took:.4g} s",
                   f"≤ p−2+k rounds of α + nβ/k: {p - 2 + k} × {segment_s:.4g} s = {allowed:.4g} s",
                   clue=clue, rounds=f"{took / segment_s:.3g} / {p - 2 + k}")


def _bytes(case: Case, outcome: Outcome) -> Verdict:
    if outcome.trace.sent_bytes((case.facts["root"] - 1) % case.ranks):
        return Verdict(False, "the last of the chain sends as well", "all but the last send",
                       clue="No rank after the last one needs x: a chain, not a ring.")
    return standard.sent_at_most(case, outcome, case.facts["nbytes"], "n", (
        "Something is sent twice: each rank sends each segment to the next one, once."))


def _memory(case: Case, outcome: Outcome) -> Verdict:
    segment = case.facts["nbytes"] // case.args[0][2]
    return standard.held_at_most(outcome, segment, ": one segment", (
        "More than a segment is held beside x. Segments from x.tensor_split(segments) are "
        "views: receive into them, and send them, as they are."))


def _build(seed: int) -> list[Check]:
    def case(ranks: int, n: int, root: int, k: int, dtype: torch.dtype = standard.F32,
             **more: Any) -> Case:
        return standard.broadcast_case(
            ranks, n, root, k, dtype=dtype, seed=seed, said=f", {counted(k, 'segment')}",
            errors=ERRORS, latency_s=LATENCY_S,
            bandwidth_Bps=max(n * dtype.itemsize, 1) / VECTOR_S, **more)

    n = 24 + 12 * (seed % 3)  # divisible by the numbers of segments
    plain = [case(p, n, 0, k) for p, k in ((4, 3), (2, 4), (8, 6))]
    others = [case(p, n + extra, root, k) for p, extra, root, k in (
        (1, 0, 0, 3), (3, 0, 2, 4), (5, 0, 1, 1), (6, 1, 4, 3), (7, 0, 6, 12), (9, 5, 3, 4),
        (13, 0, 12, 2))]
    edges = [*(case(4, few, 1, 8) for few in (3, 1, 0)),
             *(case(4, 12, 0, 3, dtype) for dtype in (standard.F64, standard.I64, standard.BF16))]
    timed = [*plain, *others[1:]]
    return [
        Check("values", 2, "2, 4, 8 ranks, root 0", plain, _values),
        Check("any p, root, k", 2, "1 to 13 ranks, 1 to 12 segments", others, _values,
              "It works for root 0, or for even cuts, only. me = (comm.rank - root) % p is a "
              "rank's place in the chain, and x.tensor_split(segments) cuts any x."),
        Check("edges", 1, "more segments than elements; dtypes", edges, _values,
              "x may have fewer elements than there are segments, even none, and any dtype."),
        Check("time", 3, "2 to 13 ranks, simulated", timed, _time, provided=_values),
        Check("bytes", 1, "2 to 13 ranks", timed, _bytes, provided=_values),
        Check("memory", 1, "4 ranks, 192000 × float32, 8 segments",
              [case(4, 192_000, 0, 8, meter=True)], _memory, provided=_values),
        standard.real(case(4, 1000, 2, 5, gloo=True), _values),
    ]


EXERCISE = Exercise("pipelined-chain", "Pipelined chain", "04", 2, "chain_broadcast", _build)
