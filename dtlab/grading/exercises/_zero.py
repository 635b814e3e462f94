"""What the two exercises on ZeRO judge alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtlab.grading.case import Outcome
from dtlab.grading.exercise import Verdict

SLACK = 1.02  # of bytes: counts and other small messages


def close(came: Any, right: Tensor, rtol: float) -> bool:
    """Is `came` a tensor of the right shape and, up to rounding, values?"""
    return (isinstance(came, Tensor) and came.shape == right.shape
            and torch.allclose(came.double(), right.double(), rtol=rtol, atol=rtol))


def places(came: Any, right: Tensor) -> str:
    """What differs, in a few words."""
    if not isinstance(came, Tensor):
        return f"{type(came).__name__} instead of a tensor"
    if came.shape != right.shape:
        return f"shape {tuple(came.shape)} instead of {tuple(right.shape)}"
    return f"off by {(came.double() - right.double()).abs().max():.2g}"


def too_many_bytes(outcome: Outcome, ranks: int, allowed: float, bound: str, clue: str) -> Verdict:
    """Does no rank send more than `allowed` bytes?"""
    sent = [outcome.trace.sent_bytes(rank) for rank in range(ranks)]
    most = max(sent)
    text = f"{most:,} / {int(allowed * SLACK):,}"
    if most > allowed * SLACK:
        return Verdict(False, f"rank {sent.index(most)} sent {most:,} B",
                       f"≤ {int(allowed * SLACK):,} B", text, clue=clue)
    return Verdict(True, f"{most:,} B a rank", bound, text)
