"""The reductions, each an in-place combination of two tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dtlab.errors import ConfigError, ShapeMismatch

Op = str | Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,  # a sum, divided by the number of ranks at the end
    "prod": torch.Tensor.mul_,
    "max": lambda into, x: torch.maximum(into, x, out=into),
    "min": lambda into, x: torch.minimum(into, x, out=into),
}


def check_op(op: Op, dtype: torch.dtype) -> None:
    """Raise `ConfigError` unless `op` is known and defined for `dtype`."""
    if callable(op):
        return
    if op not in COMBINE:
        raise ConfigError(f"unknown op {op!r}; choose one of {', '.join(COMBINE)}, or a function")
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(f"op 'avg' of {dtype} would not be whole; use 'sum' or a float dtype")
    if op in ("max", "min") and dtype.is_complex:
        raise ConfigError(f"op {op!r} is not defined for {dtype}: complex numbers have no order")


def combine_(into: torch.Tensor, x: torch.Tensor, op: Op = "sum") -> torch.Tensor:
    """into ← into op x, in place; returns `into`. Same shape and dtype, else `ShapeMismatch`."""
    if into.is_meta:  # only time matters: there is nothing to add
        return into
    if into.shape != x.shape or into.dtype != x.dtype:
        raise ShapeMismatch(
            f"accumulate_ needs equal shapes and dtypes; got {x.dtype} {tuple(x.shape)} "
            f"into {into.dtype} {tuple(into.shape)}"
        )
    combiner(op, into.dtype)(into, x)
    return into


def combiner(op: Op, dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """`combine_` for tensors of `dtype` that are known to fit. Raises as `check_op`."""
    check_op(op, dtype)
    return (lambda into, x: into.copy_(op(into, x))) if callable(op) else COMBINE[op]


def finish_average_(x: torch.Tensor, op: Op, count: int) -> torch.Tensor:
    """The last step of op "avg": x ← x / count, in place. Other ops: nothing. Returns `x`."""
    return x.div_(count) if op == "avg" and not x.is_meta else x


def overlaps_itself(x: torch.Tensor) -> bool:
    """Do elements of `x` share memory, as in an expanded tensor? Then it can't be changed."""
    return any(step == 0 and size > 1 for size, step in zip(x.shape, x.stride(), strict=True))


def swapped(op: Op) -> Op:
    """`op` with its operands in the other order; named ops commute, so they stay as they are."""
    return (lambda a, b: op(b, a)) if callable(op) else op


def identity(x: torch.Tensor, op: Op) -> torch.Tensor:
    """Fill `x`, in place, with what changes nothing under `op`; a function's is not known."""
    if callable(op) or x.is_meta:
        return x
    if op in ("max", "min") and x.dtype != torch.bool:
        info = torch.finfo(x.dtype) if x.dtype.is_floating_point else torch.iinfo(x.dtype)
        lowest = -float("inf") if x.dtype.is_floating_point else info.min
        highest = float("inf") if x.dtype.is_floating_point else info.max
        return x.fill_(lowest if op == "max" else highest)
    return x.fill_({"sum": 0, "avg": 0, "prod": 1, "max": 0, "min": 1}[op])
