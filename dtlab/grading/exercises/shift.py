"""Chapter 03: every rank sends its vector to the right, all at the same time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dtlab.comm import Comm
from dtlab.grading.case import ANY, Case, Outcome, Wanted, describe_case
from dtlab.grading.draws import numbers, varied
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.standard import F32, F64, I64, sent_at_most, values

LATENCY_S = 1.0  # and the bytes of one message take another second: one message is 2 s


def call_and_overwrite(shift: Callable[..., Any], comm: Comm, x: torch.Tensor
                       ) -> tuple[Any, torch.Tensor, bool]:
    """In the learner's process, return what `shift` returns, x afterwards, and whether the returned
    is another tensor than x: it is still as it was once x is overwritten."""
    value = shift(comm, x)
    if not isinstance(value, torch.Tensor):
        return value, x.clone(), False
    returned, after = value.clone(), x.clone()
    x += 1
    return returned, after, bool(torch.equal(value, returned))


def _case(ranks: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Case:
    xs = [numbers((seed, ranks, shape, rank), shape, dtype) for rank in range(ranks)]
    nbytes = math.prod(shape) * dtype.itemsize
    wanted = Wanted(
        [(xs[rank - 1], x.clone(), True if x.numel() else ANY) for rank, x in enumerate(xs)],
        items=("result", "x", "another tensor than x"), what="the left one's x; x as it was",
        least_bytes=ranks * nbytes * (ranks > 1))
    return Case(describe_case(ranks, shape, dtype), [(x,) for x in xs], LATENCY_S,
                nbytes / LATENCY_S or math.inf, harness=call_and_overwrite, wanted=wanted,
                facts={"nbytes": nbytes, "message_s": LATENCY_S * (2 if nbytes else 1)})


def _time(case: Case, outcome: Outcome) -> Verdict:
    messages = outcome.elapsed_s / case.facts["message_s"]
    return Verdict(messages <= 1 + 1e-9, f"{messages:g} messages, one after the other",
                   "α + nβ: one message", rounds=f"{messages:g} / 1", evidence=messages)


def _build(seed: int) -> list[Check]:
    even = [_case(p, (6 + varied(seed, 8),), F32, seed) for p in (2, 4, 8)]
    odd = [_case(p, (5,), F32, seed) for p in (3, 5, 9)]
    edges = [_case(1, (4,), F32, seed), _case(4, (0,), F32, seed), _case(3, (2, 3), F64, seed),
             _case(4, (5,), I64, seed)]
    timed = [*even, *odd]
    return [
        Check("even circles", 1, "2, 4, 8 ranks", even, values),
        Check("odd circles", 1, "3, 5, 9 ranks", odd, values),
        Check("edges", 1, "1 rank; empty; 2-d; int64", edges, values),
        Check("time", 2, "2 to 9 ranks, simulated", timed, _time, values),
        Check("bytes", 1, "2 to 9 ranks", timed,
              sent_at_most(lambda case: case.facts["nbytes"], "x, once"), values),
    ]


EXERCISE = Exercise("shift", "Shift to the right", "shift", _build)
