"""What exercises on messages check alike: values, rounds, and that they came through `comm`."""

from __future__ import annotations

from typing import Any

import torch

from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Verdict

F32, F64, BF16, I64 = torch.float32, torch.float64, torch.bfloat16, torch.int64


def lg_ceil(p: int) -> int:
    """⌈lg p⌉."""
    return (p - 1).bit_length()


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Whole numbers from 1 to 99, in any dtype exact."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(1, 100, shape, generator=random).to(dtype)


def not_sent(outcome: Outcome, least: int) -> Verdict | None:
    """None if at least `least` bytes were sent: fewer can't have brought the right values."""
    sent = outcome.trace.sent_bytes()
    if sent >= least:
        return None
    return Verdict(False, f"{sent:,} B sent in all", f"≥ {least:,} B in all",
                   clue="The values are right, but fewer bytes were sent than it takes: they did "
                        "not come through comm, and only what does counts.")


def compare(name: str, got: Any, wanted: torch.Tensor, whose: str, clue: str) -> Verdict | None:
    """None if `got` is `wanted`, to the bit; else what is wrong with it."""
    if not isinstance(got, torch.Tensor):
        return Verdict(False, f"{name} is {type(got).__name__}", "a tensor",
                       clue="Return the tensor that holds the result.")
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return Verdict(False, f"{name}: {got.dtype} {tuple(got.shape)}",
                       f"{wanted.dtype} {tuple(wanted.shape)}",
                       clue="The result has the wrong shape or dtype.")
    different = (got != wanted).nonzero().tolist()
    if not different:
        return None
    at = tuple(different[0])
    place = f"{name}[{', '.join(map(str, at))}]" if at else name
    return Verdict(False, f"{place} = {got[at].item():g}", f"{wanted[at].item():g}, {whose}",
                   clue=clue)


def rounds(case: Case, outcome: Outcome, allowed: int, formula: str, clue: str) -> Verdict:
    """One second a message, and infinite bandwidth: the virtual time counts the rounds."""
    took = outcome.elapsed_s
    text = f"{took:g} / {allowed}"
    passed = took <= allowed + 1e-9
    return Verdict(passed, f"{took:g} rounds", f"≤ {formula} = {allowed} rounds", rounds=text,
                   clue="" if passed else clue)
