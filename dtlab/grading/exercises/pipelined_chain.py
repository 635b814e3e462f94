"""Chapter 04: a vector in segments down a chain of ranks, each passing on while it receives."""

from __future__ import annotations

from itertools import pairwise

import torch

from dtlab.grading.case import Case, Outcome, describe_case
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises import _shared as shared
from dtlab.grading.exercises._shared import BF16, F32, F64, I64
from dtlab.grading.exercises._standard import held_at_most, judge_broadcast, real

LATENCY_S, VECTOR_S = 1.0, 24.0  # of one message; of the bytes of the whole vector


def _case(ranks: int, n: int, root: int, segments: int, dtype: torch.dtype = F32, seed: int = 0,
          meter: bool = False, gloo: bool = False) -> Case:
    args = [(shared.numbers((n,), dtype, 1000 * seed + 10 * ranks + rank), root, segments)
            for rank in range(ranks)]
    nbytes = n * dtype.itemsize
    facts = {"n": n, "item": dtype.itemsize, "nbytes": nbytes, "root": root, "k": segments,
             "wanted": args[root][0].clone()}
    text = f"{describe_case(ranks, n, dtype)}, root {root}, {segments} segments"
    bandwidth = max(nbytes, 1) / VECTOR_S
    return Case(text, args, LATENCY_S, bandwidth, facts=facts, meter=meter, gloo=gloo)


def _values(case: Case, outcome: Outcome) -> Verdict:
    return judge_broadcast(case, outcome, lambda rank: _clue(case, outcome, rank))


def _clue(case: Case, outcome: Outcome, rank: int) -> str:
    root, wanted = case.facts["root"], case.facts["wanted"]
    x, before = outcome.after[rank][0], case.args[rank][0]
    if root and torch.equal(x, case.args[0][0]):
        return ("It is rank 0's x. The chain begins at the root: me = (comm.rank - root) % p is a "
                "rank's place in it.")
    right = (x == wanted).tolist()
    if torch.equal(x, before):
        return f"Rank {rank} received nothing: its x is unchanged."
    if right[0] and not right[-1]:
        return ("The end of x is missing. x.tensor_split(segments) loses no element; and there are "
                "as many segments to pass on as there are to receive.")
    return ("Some segments are not the root's. Send segment i only after it has come: in round i, "
            "receive segment i while you send segment i − 1.")


def _time(case: Case, outcome: Outcome) -> Verdict:
    """(p−2+k) rounds of a message as long as the longest segment, at most."""
    p, k, n = case.ranks, case.facts["k"], case.facts["n"]
    segment_s = LATENCY_S + VECTOR_S * -(-n // k) / n
    allowed, took = (p - 2 + k) * segment_s, outcome.elapsed_s
    came, expected = f"{took:.4g} s", f"≤ (p−2+k)(α + nβ/k) = {allowed:.4g} s"
    messages = f"{took / segment_s:.3g} / {p - 2 + k}"
    if took <= allowed * (1 + 1e-9):
        return Verdict(True, came, expected, rounds=messages)
    if outcome.trace.messages(case.facts["root"]) < k:
        clue = "It takes as long as with a single segment: cut x into `segments` and send each."
    elif _overlap(outcome, case.facts["root"]):
        clue = ("Several segments are under way at once. They share the port, so that the first "
                "arrives late: let one follow the other.")
    elif took >= (p - 1) * VECTOR_S:
        clue = ("Each rank waits for all of x before it passes anything on. Pass segment i on as "
                "soon as it has come, while segment i + 1 arrives.")
    else:
        clue = ("Receiving and sending take turns. Ports are full duplex: post both together, "
                "comm.exchange(Recv(segment i, behind), Send(segment i − 1, ahead)).")
    return Verdict(False, came, expected, rounds=messages, clue=clue)


def _overlap(outcome: Outcome, root: int) -> bool:
    """Does the root begin to send a segment before the one before it has arrived?"""
    sent = [message for message in outcome.trace.transfers if message.src == root]
    return any(after.start_s < before.end_s - 1e-9 for before, after in pairwise(sent))


def _bytes(case: Case, outcome: Outcome) -> Verdict:
    nbytes = case.facts["nbytes"]
    sent = [outcome.trace.sent_bytes(rank) for rank in range(case.ranks)]
    total, least = sum(sent), (case.ranks - 1) * nbytes
    text = f"{max(sent):,} / {nbytes:,}"
    if max(sent) <= nbytes and total == least:
        return Verdict(True, "x, once, from all but the last", "n from all but the last", text)
    last = (case.facts["root"] - 1) % case.ranks
    if sent[last]:
        clue = "The last rank of the chain sends as well; no rank after it needs x: a chain, not a ring."
    else:
        clue = "Something is sent twice: each rank sends each segment to the next one, once."
    return Verdict(False, f"{total:,} B in all", f"(p−1)·n = {least:,} B", text, clue=clue)


def _memory(case: Case, outcome: Outcome) -> Verdict:
    segment = -(-case.facts["n"] // case.facts["k"]) * case.facts["item"]
    return held_at_most(outcome, segment, ": one segment", lambda most: (
        "More than a segment is held beside x. Segments from x.tensor_split(segments) are "
        "views: receive into them, and send them, as they are."))


def _build(seed: int) -> list[Check]:
    more = 12 * (seed % 3)  # divisible as before
    plain = [_case(p, 24 + more, 0, k, seed=seed) for p, k in ((4, 3), (2, 4), (8, 6))]
    others = [_case(p, 24 + more + extra, root, k, seed=seed) for p, extra, root, k in (
        (1, 0, 0, 3), (3, 0, 2, 4), (5, 0, 1, 1), (6, 1, 4, 3), (7, 0, 6, 12), (9, 5, 3, 4),
        (13, 0, 12, 2))]
    edges = [_case(4, n, 1, 8, seed=seed) for n in (3, 1, 0)]
    kinds = [_case(4, 12, 0, 3, dtype, seed) for dtype in (F64, I64, BF16)]
    timed = [*plain, *others[1:]]
    return [
        Check("values", 2, "2, 4, 8 ranks, root 0", plain, _values),
        Check("any p, root, k", 2, "1 to 13 ranks, 1 to 12 segments", others, _values,
              "It works for root 0, or for even cuts, only. me = (comm.rank - root) % p is a rank's "
              "place in the chain, and x.tensor_split(segments) cuts any x."),
        Check("edges", 1, "more segments than elements; dtypes", [*edges, *kinds], _values,
              "x may have fewer elements than there are segments, even none, and any dtype. Empty "
              "segments are segments."),
        Check("time", 3, "2 to 13 ranks, simulated", timed, _time, provided=_values),
        Check("bytes", 1, "2 to 13 ranks", timed, _bytes, provided=_values),
        Check("memory", 1, "4 ranks, 192000 × float32, 8 segments",
              [_case(4, 192_000, 0, 8, seed=seed, meter=True)], _memory, provided=_values),
        real(_case(4, 1000, 2, 5, seed=seed, gloo=True), _values),
    ]


EXERCISE = Exercise("pipelined-chain", "Pipelined chain", "04", 2, "chain_broadcast", _build)
