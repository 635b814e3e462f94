"""What all exercises on all-reduce check: sums of small whole numbers, in place, through `comm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtlab.grading.case import Case, Outcome, describe_case
from dtlab.grading.exercise import Verdict
from dtlab.grading.exercises._standard import not_sent

F32 = torch.float32
DTYPES = (torch.float64, torch.int64, torch.int32, torch.bfloat16, torch.complex64)
# Which mistake makes just these wrong vectors?
Clue = Callable[[Case, Outcome, list[torch.Tensor]], str]


def summing_case(ranks: int, n: int, dtype: torch.dtype, seed: int, **options: Any) -> Case:
    """Small whole numbers, so that every order of summing gives the same bits; all above zero, so
    that a sum is right only if every rank is in it."""
    random = torch.Generator().manual_seed(10_000 * seed + 100 * ranks + n)
    args = []
    for _ in range(ranks):
        args.append((torch.randint(1, 10, (n,), generator=random).to(dtype),))
    total = torch.stack([x.to(_wide(dtype)) for (x,) in args]).sum(0).to(dtype)
    facts = {"n": n, "item": dtype.itemsize, "total": total}
    return Case(describe_case(ranks, n, dtype), args, facts=facts, **options)


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def judge_sums(case: Case, outcome: Outcome, clue: Clue) -> Verdict:
    """The sum on every rank, in x itself, come in messages; else the mistake that the vectors
    show: one of any all-reduce, or, by `clue`, of the algorithm in question."""
    total = case.facts["total"]
    for rank, (x, *_) in enumerate(outcome.after):
        if x.shape != total.shape or x.dtype != total.dtype:
            came = f"rank {rank}: x has become {x.dtype} {tuple(x.shape)}"
            return Verdict(False, came, f"{total.dtype} {tuple(total.shape)}",
                           clue="Write the sum into x; don't change its shape or dtype.")
        different = (x != total).nonzero()
        if len(different):
            wrong = int(different[0])
            came = f"rank {rank}: x[{wrong}] = {x[wrong].item():g}"
            expected = f"{total[wrong].item():g}, the sum"
            after = [args[0] for args in outcome.after]
            found = _common_clue(case, outcome, after) or clue(case, outcome, after)
            return Verdict(False, came, expected, clue=found)
    right = Verdict(True, "the sum, on every rank", "the sum, on every rank")
    return not_sent(outcome, least_bytes(case)) or right


def _common_clue(case: Case, outcome: Outcome, after: list[torch.Tensor]) -> str:
    """The mistakes that have nothing to do with how the sum was to be made."""
    total, p = case.facts["total"], case.ranks
    before = [args[0] for args in case.args]
    right = [torch.equal(x, total) for x in after]
    if all(map(torch.equal, after, before)):
        if all(isinstance(v, torch.Tensor) and torch.equal(v, total) for v in outcome.values):
            return ("The returned tensor is right, but x itself is unchanged: work in place, on "
                    "the memory of x (x[...] = …, x.add_(…), comm.accumulate_).")
        return "x is unchanged on every rank: nothing was added into it."
    if all(torch.allclose(x.to(_wide(x.dtype)) * p, total.to(_wide(x.dtype)), rtol=0.02)
           for x in after):
        return "That is the average; the exercise wants the sum."
    if sum(right) == 1 < p:
        return (f"Only rank {right.index(True)} holds the sum; an all-reduce leaves it on every "
                "rank.")
    return ""


def too_large(after: list[torch.Tensor], total: torch.Tensor) -> bool:
    """Is anything anywhere in more than once?"""
    return any(bool((x.abs() > total.abs()).any()) for x in after)


def least_bytes(case: Case) -> int:
    """All ranks together can't send less: p − 1 vectors to be summed, then p − 1 sums."""
    return 2 * (case.ranks - 1) * int(case.facts["n"]) * int(case.facts["item"])
