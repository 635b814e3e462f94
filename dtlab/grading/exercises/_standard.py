"""The checks that many exercises make alike: bytes, memory, real processes. What is an exercise's
own is its bounds and its clues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Verdict
from dtlab.grading.exercises import _shared as shared

Judge = Callable[[Case, Outcome], Verdict]
COLLECTIVES: dict[str, Any] = {  # of a case in which the library's collectives may be called
    "library": True, "latency_s": 1e-6, "bandwidth_Bps": 1e9}
ONLY_SIMULATED = "It works in the simulator, but not on real processes over Gloo."


def sent_at_most(case: Case, outcome: Outcome, allowed: int, right: str, bound: str,
                 clue: Callable[[list[int]], str], limit: str = "") -> Verdict:
    """Does no rank send more than `allowed` bytes? clue(sent by rank): why it may be more."""
    sent = [outcome.trace.sent_bytes(rank) for rank in range(case.ranks)]
    most = max(sent)
    nbytes = f"{most:,} / {allowed:,}"
    if most <= allowed:
        return Verdict(True, right or f"{most:,} B a rank", bound, nbytes)
    return Verdict(False, f"rank {sent.index(most)} sent {most:,} B", f"≤ {allowed:,} B{limit}",
                   nbytes, clue=clue(sent))


def held_at_most(outcome: Outcome, allowed: int, what: str, clue: Callable[[int], str]) -> Verdict:
    """Does no rank hold more than `allowed` bytes beside x? clue(most): why it may be more."""
    most = max(outcome.peak_bytes)
    passed = most <= allowed
    return Verdict(passed, f"{most:,} B beside x", f"≤ {allowed:,} B{what}",
                   clue="" if passed else clue(most))


def real(case: Case, judge: Judge, provided: Judge | None = None) -> Check:
    """The same on real processes."""
    return Check("real", 1, f"{case.ranks} processes over Gloo", [case], judge, ONLY_SIMULATED,
                 provided=provided)


def judge_broadcast(case: Case, outcome: Outcome, clue: Callable[[int], str]) -> Verdict:
    """Has every rank the root's x, in its own, come in messages? clue(rank): the mistake that its
    x shows, if it isn't one of any broadcast. The case's facts: root, wanted, nbytes."""
    root, wanted = case.facts["root"], case.facts["wanted"]
    for rank, (x, *_) in enumerate(outcome.after):
        wrong = shared.compare(f"rank {rank}: x", x, wanted, f"as rank {root} has it", "")
        if wrong is None:
            continue
        value = outcome.values[rank]
        if rank == root:
            return wrong._replace(clue="The root's own x was overwritten: the root only sends.")
        if isinstance(value, torch.Tensor) and torch.equal(value, wanted):
            return wrong._replace(clue="The returned tensor is right, but x is not: receive into x "
                                       "itself.")
        return wrong._replace(clue=clue(rank))
    right = Verdict(True, "the root's x, on every rank", "the root's x, on every rank")
    return shared.not_sent(outcome, (case.ranks - 1) * case.facts["nbytes"]) or right
