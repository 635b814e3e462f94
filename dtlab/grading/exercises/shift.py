"""Chapter 03: every rank sends its vector to the right, all at the same time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dtlab.comm import Comm
from dtlab.grading.case import Case, Outcome, describe_case
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises import _standard as standard
from dtlab.grading.exercises._standard import F32, F64, I64, sent_at_most

LATENCY_S = 1.0  # and the bytes of one message take another second: one message is 2 s


def _case(ranks: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Case:
    args = [(standard.numbers(shape, dtype, 1000 * seed + 10 * ranks + r),) for r in range(ranks)]
    nbytes = math.prod(shape) * dtype.itemsize
    return Case(describe_case(ranks, shape, dtype), args, LATENCY_S, nbytes / LATENCY_S or math.inf,
                harness=call_and_overwrite,
                facts={"nbytes": nbytes, "message_s": LATENCY_S * (2 if nbytes else 1)})


def call_and_overwrite(shift: Callable[..., Any], comm: Comm, x: torch.Tensor
                       ) -> tuple[Any, torch.Tensor, Any]:
    """In the learner's process: what `shift` returns, x afterwards, and what of the returned is
    left once x is overwritten, which changes it if it is x itself."""
    value = shift(comm, x)
    returned, after = value.clone() if isinstance(value, torch.Tensor) else value, x.clone()
    x += 1
    return returned, after, value


def _values(case: Case, outcome: Outcome) -> Verdict:
    sent = [args[0] for args in case.args]
    for rank, (value, x, kept) in enumerate(outcome.values):
        wanted = sent[rank - 1]
        if wrong := standard.compare(f"rank {rank}: result", value, wanted, "the left one's x", ""):
            return wrong._replace(clue=_clue(outcome, rank, sent) or wrong.clue)
        if wrong := standard.compare(f"rank {rank}: x", x, sent[rank], "as it was", (
                "x belongs to the caller: receive into a new tensor, torch.empty_like(x), and "
                "leave x as it is.")):
            return wrong
        if standard.compare("", kept, wanted, "", ""):
            clue = "It is right, but x itself: return a new tensor, x.clone() if there is one rank."
            return Verdict(False, f"rank {rank} returned x itself", "a new tensor", clue=clue,
                           sure=True)
    right = Verdict(True, "right on every rank", "the left neighbour's x")
    return standard.not_sent(outcome, case.ranks * case.facts["nbytes"] * (case.ranks > 1)) or right


def _clue(outcome: Outcome, rank: int, sent: list[torch.Tensor]) -> str:
    values = [value for value, *_ in outcome.values]

    def is_of(rank: int, other: int) -> bool:
        return standard.compare("", values[rank], sent[other % len(sent)], "", "") is None

    if all(is_of(r, r) for r in range(len(sent))):
        return "Each rank returned its own x: return the tensor that you received into."
    if all(is_of(r, r + 1) for r in range(len(sent))):
        return "It went round the wrong way: send to rank + 1, receive from rank − 1."
    others = [r for r in range(len(sent)) if is_of(rank, r)]
    if others:
        whose = "its own x" if rank in others else f"that of rank {others[0]}"
        return (f"Rank {rank} returned {whose}. Each rank sends its own x to its right, not what "
                "it has received, and returns what comes from its left.")
    value, own = values[rank], sent[rank]
    if isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (own.shape, own.dtype):
        return ("This is no rank's x. What you receive into is whole once `wait` has returned: "
                "read it then.")
    return ""


def _time(case: Case, outcome: Outcome) -> Verdict:
    messages = outcome.elapsed_s / case.facts["message_s"]
    rounds = f"{messages:g} / 1"
    if messages <= 1 + 1e-9:
        return Verdict(True, "α + nβ: one message", "one message", rounds=rounds)
    clue = (f"The shift took as long as {messages:g} messages one after the other. Ports are full "
            "duplex: all ranks can send and receive at once, with comm.sendrecv, or by posting "
            "both (comm.exchange, comm.isend) before waiting for either.")
    return Verdict(False, f"{messages:g} messages", "one message", rounds=rounds, clue=clue)


def _bytes(case: Case, outcome: Outcome) -> Verdict:
    return sent_at_most(case, outcome, case.facts["nbytes"], "x, once", (
        "Each rank sends its x once and nothing else; don't pass on what others sent."))


def _build(seed: int) -> list[Check]:
    even = [_case(p, (6 + seed % 5,), F32, seed) for p in (2, 4, 8)]
    odd = [_case(p, (5,), F32, seed) for p in (3, 5, 9)]
    edges = [_case(1, (4,), F32, seed), _case(4, (0,), F32, seed), _case(3, (2, 3), F64, seed),
             _case(4, (5,), I64, seed)]
    timed = [*even, *odd]
    return [
        Check("even circles", 1, "2, 4, 8 ranks", even, _values),
        Check("odd circles", 1, "3, 5, 9 ranks", odd, _values),
        Check("edges", 1, "1 rank; empty; 2-d; int64", edges, _values,
              "One rank alone gets its own x back; x may be empty, or of any shape and dtype."),
        Check("time", 2, "2 to 9 ranks, simulated", timed, _time, provided=_values),
        Check("bytes", 1, "2 to 9 ranks", timed, _bytes, provided=_values),
    ]


EXERCISE = Exercise("shift", "Shift to the right", "03", 2, "shift", _build)
