"""What collectives ought to give, computed on one process in float64 (or int64), without dtlab."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dtlab import Comm, collectives

RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13)
OPS = ("sum", "prod", "max", "min", "avg")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
          torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128)
ALGORITHMS = [(collective, algorithm) for collective, algorithms in collectives.ALGORITHMS.items()
              for algorithm in algorithms]
MOVING = [(c, a) for c, a in ALGORITHMS if c != "barrier"]  # those that move data


def is_defined(op: str, dtype: torch.dtype) -> bool:
    """Does `op` mean something for `dtype`?"""
    if op == "avg":
        return dtype.is_floating_point or dtype.is_complex
    return not (dtype.is_complex and op in ("max", "min"))


def given(rank: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What rank `rank` holds before: small numbers, of both signs where there are signs."""
    numbers = torch.tensor([(3 * i + 5 * rank) % 7 - 2 for i in range(n)], dtype=torch.int64)
    if dtype == torch.bool:
        return numbers > 0
    if dtype == torch.uint8:
        return (numbers + 2).to(dtype)
    if dtype.is_floating_point:
        return (numbers + 0.25 * (rank % 4)).to(dtype)
    return torch.complex(numbers.double(), numbers.double() / 2 - rank).to(dtype) \
        if dtype.is_complex else numbers.to(dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: exact, or far more precise than `dtype`."""
    if dtype == torch.bool:
        return dtype
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def combined(op: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """`parts`, combined from the left, in a wide dtype."""
    combine: dict[str, Callable[..., torch.Tensor]] = {
        "sum": torch.add, "avg": torch.add, "prod": torch.mul,
        "max": torch.maximum, "min": torch.minimum,
    }
    total = functools.reduce(combine[op], [part.to(wide(part.dtype)) for part in parts])
    return total / len(parts) if op == "avg" else total


def expected(collective: str, parts: list[torch.Tensor], root: int, op: str) -> list[torch.Tensor]:
    """What every rank holds afterwards, if rank r began with `parts[r]`."""
    ranks = range(len(parts))
    if collective == "broadcast":
        return [parts[root]] * len(parts)
    total = combined(op, parts).to(parts[0].dtype)
    if collective == "reduce":
        return [total if rank == root else parts[rank] for rank in ranks]
    assert collective == "all_reduce", f"no oracle for {collective} yet"
    return [total] * len(parts)


def call(
    comm: Comm, collective: str, algorithm: str, x: torch.Tensor, root: int = 0, op: Any = "sum"
) -> torch.Tensor:
    """Call any collective that takes one tensor, with the arguments that it has."""
    if collective == "broadcast":
        return collectives.broadcast(comm, x, root, algorithm=algorithm)
    if collective == "reduce":
        return collectives.reduce(comm, x, root, op, algorithm=algorithm)
    if collective == "barrier":
        collectives.barrier(comm, algorithm=algorithm)
        return x
    assert collective == "all_reduce", f"don't know how to call {collective} yet"
    return collectives.all_reduce(comm, x, op, algorithm=algorithm)


def assert_close(got: torch.Tensor, want: torch.Tensor, ranks: int) -> None:
    """Equal; for floats, up to what rounding `ranks` times may cost."""
    if got.dtype.is_floating_point or got.dtype.is_complex:
        eps = torch.finfo(got.dtype).eps * 2 * ranks
        scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
        torch.testing.assert_close(got, want, rtol=eps, atol=eps * scale)
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=0)
