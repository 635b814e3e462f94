"""What the exercises on data parallelism judge alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Verdict
from dtlab.grading.exercises._standard import compare

F32, F64 = torch.float32, torch.float64


def random_tensors(sizes: Sequence[int], seed: int, dtype: torch.dtype = F64) -> list[Tensor]:
    """A tensor of each size, normal."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=random, dtype=F64).to(dtype) for n in sizes]


def summed(gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """gradients[rank][i] → the sum over all ranks of each."""
    return [torch.stack(each).sum(0) for each in zip(*gradients, strict=True)]


def close(came: Any, right: Sequence[Tensor]) -> bool:
    """Is `came` a list of these tensors, up to rounding?"""
    return (isinstance(came, (list, tuple)) and len(came) == len(right)
            and all(isinstance(a, Tensor) and a.shape == b.shape and a.dtype == b.dtype
                    and bool(_equal(a, b).all()) for a, b in zip(came, right, strict=True)))


def _equal(a: Tensor, b: Tensor) -> Tensor:
    """Element by element, up to rounding."""
    exact = 1e-5 if b.dtype == F32 else 1e-12
    return a.double().isclose(b.double(), exact, exact)


def judge_values(case: Case, found: Sequence[Any], right: Sequence[Tensor], expected: str,
                 mistakes: Mapping[str, Callable[[int], Sequence[Tensor]]],
                 otherwise: str = "") -> Verdict:
    """Does every rank have `right`? mistakes: a clue → what rank r has that makes this mistake.
    otherwise: what is said if none of them explains it."""
    for rank, came in enumerate(found):
        if close(came, right):
            continue
        if not isinstance(came, (list, tuple)) or len(came) != len(right):
            return Verdict(False, f"rank {rank}: {type(came).__name__}",
                           f"a list of {len(right)} tensors", clue="Return one tensor for each.")
        number = next((i for i, (a, b) in enumerate(zip(came, right, strict=True))
                       if not close([a], [b])), 0)
        mine, wanted = came[number], right[number]
        fits = isinstance(mine, Tensor) and (mine.shape, mine.dtype) == (wanted.shape, wanted.dtype)
        if not fits and (wrong := compare(f"rank {rank}: tensor {number}", mine, wanted, "", "")):
            return wrong
        clue = next((clue for clue, wrong in mistakes.items()
                     if all(close(mine, wrong(r)) for r, mine in enumerate(found))), "")
        at = int((~_equal(mine, wanted)).nonzero()[0])
        return Verdict(False, f"rank {rank}: tensor {number}[{at}] = {mine[at].item():.6g}",
                       f"{wanted[at].item():.6g}, {expected}", clue=clue or otherwise,
                       sure=bool(clue))
    return Verdict(True, "right on every rank", expected)


def sent_in_rings(outcome: Outcome, ranks: int) -> list[int]:
    """Bytes that all ranks send in the first, second, … ring all-reduce of this many ranks."""
    each = 2 * (ranks - 1)
    rings: list[int] = []
    for rank in range(ranks):
        sends = [m.nbytes for m in outcome.trace.transfers if m.src == rank]
        for number in range(0, len(sends), each):
            if number // each == len(rings):
                rings.append(0)
            rings[number // each] += sum(sends[number : number + each])
    return rings
