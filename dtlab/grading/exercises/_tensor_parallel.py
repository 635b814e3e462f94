"""What the exercises on tensor parallelism judge alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Verdict

F64 = torch.float64
Clues = Sequence[tuple[str, Callable[[int], Tensor]]]  # what is said; what rank r then returns


def normal(random: torch.Generator, *shape: int) -> Tensor:
    """Normal, in float64."""
    return torch.randn(*shape, generator=random, dtype=F64)


def judge_part(name: str, came: Sequence[Any], right: Sequence[Tensor], clues: Clues = (),
               otherwise: str = "") -> Verdict | None:
    """None if each rank r's `came[r]` is `right[r]`, up to rounding; else what is wrong.

    otherwise: what is said if none of the mistakes of `clues` explains it.
    """
    def close(a: Any, b: Tensor) -> bool:
        return (isinstance(a, Tensor) and a.shape == b.shape
                and bool(torch.allclose(a.double(), b, rtol=1e-9, atol=1e-9)))

    wrong = next((r for r, (a, b) in enumerate(zip(came, right, strict=True)) if not close(a, b)),
                 None)
    if wrong is None:
        return None
    clue = next((clue for clue, mistake in clues
                 if all(close(a, mistake(r)) for r, a in enumerate(came))), "")
    found, wanted = came[wrong], right[wrong]
    if isinstance(found, Tensor) and found.shape == wanted.shape:
        at = tuple((~found.double().isclose(wanted, 1e-9, 1e-9)).nonzero()[0].tolist())
        place = f"{name}{list(at) if at else ''}"
        return Verdict(False, f"rank {wrong}: {place} = {found[at].item():.6g}",
                       f"{wanted[at].item():.6g}", clue=clue or otherwise, sure=bool(clue))
    what = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    return Verdict(False, f"rank {wrong}: {name}: {what}",
                   f"a tensor of shape {tuple(wanted.shape)}", clue=clue or otherwise,
                   sure=bool(clue))


def returned(outcome: Outcome, count: int) -> list[Sequence[Any]] | Verdict:
    """What each rank returned, if it is `count` things."""
    for rank, value in enumerate(outcome.values):
        if not isinstance(value, (tuple, list)) or len(value) != count:
            return Verdict(False, f"rank {rank} returned {str(value)[:40]}", f"{count} tensors",
                           clue=f"Return {count} tensors, as the task lists them.")
    return outcome.values


def judge_bytes(case: Case, outcome: Outcome, allowed: float, bound: str, clue: str) -> Verdict:
    """Does no rank send more than `allowed` bytes?"""
    most = max(outcome.trace.sent_bytes(rank) for rank in range(case.ranks))
    text = f"{most:,} / {int(allowed):,}"
    return Verdict(most <= allowed, f"{most:,} B a rank", bound, text,
                   clue="" if most <= allowed else clue)
