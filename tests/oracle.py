"""What collectives ought to give, computed on one process in float64 (or int64), without dtlab."""

from __future__ import annotations

import functools
import inspect
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
IN_PLACE = [(c, a) for c, a in ALGORITHMS
            if c in ("broadcast", "reduce", "all_reduce", "scan", "exscan")]
REDUCING = ("reduce", "reduce_scatter", "all_reduce", "scan", "exscan")


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


def pieces_of(x: torch.Tensor, p: int) -> torch.Tensor:
    """A different piece for each of p ranks, made from `x`: shape (p, *x.shape)."""
    if x.is_meta:  # nothing to differ in, and torch is slow to roll it
        return x.new_empty(p, *x.shape)
    flat = x.detach().flatten()
    return torch.stack([flat.roll(rank).reshape(x.shape) for rank in range(p)])


def neutral(op: str, x: torch.Tensor) -> torch.Tensor:
    """What rank 0 gets from an exclusive scan: the result of nothing."""
    if op in ("max", "min") and x.dtype != torch.bool:
        infinite = {"max": -float("inf"), "min": float("inf")}[op]
        if x.dtype.is_floating_point:
            return torch.full_like(x, infinite)
        info = torch.iinfo(x.dtype)
        return torch.full_like(x, info.min if op == "max" else info.max)
    return torch.full_like(x, op in ("prod", "min"))


def expected(collective: str, parts: list[torch.Tensor], root: int = 0, op: str = "sum",
             pieces: Any = None) -> list[Any]:
    """What every rank gets, if rank r called `call` with `parts[r]`, and with `pieces[r]`."""
    p, dtype = len(parts), parts[0].dtype
    if pieces is None:
        pieces = [pieces_of(part, p) for part in parts]  # pieces[r][s]: from r, for s

    def total(some: list[torch.Tensor]) -> torch.Tensor:
        return combined(op, some).to(dtype)

    rules: dict[str, Callable[[int], Any]] = {
        "broadcast": lambda r: parts[root],
        "reduce": lambda r: total(parts) if r == root else parts[r],
        "scatter": lambda r: pieces[root][r],
        "gather": lambda r: torch.stack(parts) if r == root else None,
        "all_gather": lambda r: torch.stack(parts),
        "reduce_scatter": lambda r: total([piece[r] for piece in pieces]),
        "all_reduce": lambda r: total(parts),
        "all_to_all": lambda r: torch.stack([piece[r] for piece in pieces]),
        "scan": lambda r: total(parts[: r + 1]),
        "exscan": lambda r: total(parts[:r]) if r else neutral(op, parts[0]),
        "barrier": lambda r: None,
    }
    return [rules[collective](rank) for rank in range(p)]


def call(
    comm: Comm, collective: str, algorithm: str, x: torch.Tensor, root: int = 0, op: Any = "sum",
    pieces: torch.Tensor | None = None,
) -> Any:
    """Call any collective with the arguments that it has; `pieces` are those of `x` by default."""
    function = getattr(collectives, collective)
    wanted = inspect.signature(function).parameters
    given: dict[str, Any] = {"algorithm": algorithm}
    given |= {"root": root} if "root" in wanted else {}
    given |= {"op": op} if "op" in wanted else {}
    if collective == "barrier":
        return function(comm, **given)
    if "parts" in wanted and pieces is None:
        pieces = pieces_of(x, comm.size)
    if collective == "scatter":
        return function(comm, pieces if comm.rank == root else None, torch.empty_like(x), **given)
    return function(comm, pieces if "parts" in wanted else x, **given)


def assert_close(got: torch.Tensor | None, want: torch.Tensor | None, ranks: int) -> None:
    """Equal; for floats, up to what rounding `ranks` times may cost."""
    if got is None or want is None:
        assert got is want
        return
    if got.dtype.is_floating_point or got.dtype.is_complex:
        eps = torch.finfo(got.dtype).eps * 2 * ranks
        scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
        torch.testing.assert_close(got, want, rtol=eps, atol=eps * scale)
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=0)
