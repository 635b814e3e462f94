"""The reductions, each an in-place combination of two tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from dtlab.checks import check_choice, short
from dtlab.errors import ConfigError, ShapeMismatch

Op = str | Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Combine = Callable[[torch.Tensor, torch.Tensor], object]

COMBINE: dict[str, Combine] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,  # a sum, divided by the number of ranks at the end
    "prod": torch.Tensor.mul_,
    "max": lambda into, x: torch.maximum(into, x, out=into),
    "min": lambda into, x: torch.minimum(into, x, out=into),
}
# torch holds these dtypes, and hardly computes with them. Here the first kind is computed in
# another dtype and rounded back; the second as the signed integers that have the same bits.
WIDER = {
    torch.float8_e4m3fn: torch.float32, torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32, torch.float8_e5m2fnuz: torch.float32,
    torch.complex32: torch.complex64,
}
FINITE = {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}  # have no infinity
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
NUMBERS = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    *WIDER, *SIGNED,
}


# What others call these reductions: torch's ReduceOp, and functions of Python.
NAMED: dict[str, Op] = {
    "SUM": "sum", "AVG": "avg", "PRODUCT": "prod", "MAX": "max", "MIN": "min",
    "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}
_TORCHS = (dist.ReduceOp, dist.ReduceOp.RedOpType) if dist.is_available() else ()
_PYTHONS: dict[object, Op] = {sum: "sum", max: "max", min: "min"}
FOREIGN = {*_TORCHS, type(sum)}  # the classes of such


def named_op(op: Op) -> Op:
    """Return `op` as it is called here, if it is a `torch.distributed.ReduceOp`, or Python's own
    sum, max or min; else `op` itself.

    >>> named_op(torch.distributed.ReduceOp.SUM), named_op(max), named_op("prod")
    ('sum', 'max', 'prod')
    """
    if isinstance(op, _TORCHS):
        name = str(getattr(op, "op", op)).rpartition(".")[2]
        if name not in NAMED:
            raise ConfigError(f"op ReduceOp.{name} is not known here; choose one of "
                              f"{', '.join(COMBINE)}, or a function")
        return NAMED[name]
    return _PYTHONS.get(op, op) if op.__class__ is type(sum) else op


def check_op(op: Op, dtype: torch.dtype) -> None:
    """Raise `ConfigError` unless `op` is known and defined for `dtype`."""
    if callable(op):
        return
    check_choice("op", op, COMBINE, ", or a function")
    if dtype not in NUMBERS:
        raise ConfigError(f"op {op!r} is not defined for {dtype}, with which torch can't compute; "
                          f"convert the tensor to a dtype of numbers first")
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(f"op 'avg' of {dtype} would not be whole; use 'sum' or a float dtype")
    if op in ("max", "min") and dtype.is_complex:
        raise ConfigError(f"op {op!r} is not defined for {dtype}: complex numbers have no order")


def combine_(into: torch.Tensor, x: torch.Tensor, op: Op = "sum") -> torch.Tensor:
    """into ← into op x, in place; returns `into`. Same shape and dtype, else `ShapeMismatch`."""
    if not isinstance(into, torch.Tensor) or not isinstance(x, torch.Tensor):
        raise ConfigError(f"accumulate_ takes two tensors, not {short(into)} and {short(x)}")
    if into.shape != x.shape or into.dtype != x.dtype or into.is_meta != x.is_meta:
        raise ShapeMismatch(
            f"accumulate_ needs equal shapes, dtypes and devices; got {x.dtype} {tuple(x.shape)} "
            f"on {x.device} into {into.dtype} {tuple(into.shape)} on {into.device}"
        )
    op = named_op(op)
    check_op(op, into.dtype)
    if into.is_meta:  # only time matters: there is nothing to add
        return into
    if callable(op):
        into.copy_(_applied(op, into, x))
    elif into.dtype in WIDER:
        wide = WIDER[into.dtype]
        total = into.to(wide)
        COMBINE[op](total, x.to(wide))
        into.copy_(total)
    elif into.dtype in SIGNED:
        _combine_unsigned_(into.view(SIGNED[into.dtype]), x.view(SIGNED[into.dtype]), op)
    else:
        COMBINE[op](into, x)
    return into


def _applied(op: Combine, into: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Apply the function `op` to the two. Raises `ConfigError` unless the result is like them."""
    result = op(into, x)
    if not isinstance(result, torch.Tensor) or (result.shape, result.dtype) != (x.shape, x.dtype):
        got = f"a tensor of {result.dtype} {tuple(result.shape)}" if isinstance(
            result, torch.Tensor) else short(result)
        raise ConfigError(f"op {getattr(op, '__name__', short(op))} must return a tensor like the "
                          f"two it is given, {x.dtype} {tuple(x.shape)}; it returned {got}")
    return result


def _combine_unsigned_(into: torch.Tensor, x: torch.Tensor, op: str) -> None:
    """Do as `COMBINE` for the bits of unsigned integers in signed ones.

    Sums and products have the same bits either way. The order is the same once the highest bit is
    flipped, which makes the smallest unsigned number the smallest signed one.
    """
    highest_bit = torch.iinfo(into.dtype).min if op in ("max", "min") else 0
    into ^= highest_bit
    COMBINE[op](into, x ^ highest_bit)
    into ^= highest_bit


def finish_average_(x: torch.Tensor, op: Op, count: int) -> torch.Tensor:
    """The last step of op "avg": x ← x / count, in place. Other ops: nothing. Returns `x`."""
    if op != "avg" or x.is_meta:
        return x
    return x.copy_(x.to(WIDER[x.dtype]) / count) if x.dtype in WIDER else x.div_(count)


def not_dense(x: torch.Tensor) -> str:
    """Say what `x` is if it is no dense tensor, such as "a nested tensor"; "" if it is one."""
    if x.is_quantized:
        return "a quantized tensor"
    if x.is_nested:
        return "a nested tensor"
    if x.layout is not torch.strided:
        return f"a {x.layout} tensor"
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        return "a dual tensor of forward-mode differentiation"
    if hasattr(x, "to_local"):
        return "a DTensor, whose to_local() returns this rank's part"
    return "" if _has_memory(x) else "a tensor without memory (of torch.func, or a FakeTensor)"


def _has_memory(x: torch.Tensor) -> bool:
    try:
        return not isinstance(x, FakeTensor) and (x.data_ptr() != 0 or not x.numel() or x.is_meta)
    except RuntimeError:
        return False


def span_bytes(x: torch.Tensor) -> int:
    """The number of bytes from the first element of `x`, which has some, to the end of the last."""
    return x.nbytes if x.is_contiguous() else x.itemsize * (1 + sum(
        (size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)))


def overlaps_itself(x: torch.Tensor) -> bool:
    """Do elements of `x` share memory, as in an expanded tensor, or in windows (`unfold`)? Then it
    can't be changed. They don't if each dimension steps over all that the finer ones span."""
    span = 1
    for step, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and step < span:
            return x.numel() > 0
        span += (size - 1) * step
    return False


def check_receives(rank: int, x: object) -> None:
    """Raise `ConfigError` if something is to be received into a tensor that can't be changed."""
    if isinstance(x, torch.Tensor) and not x.is_contiguous() and overlaps_itself(x):
        raise ConfigError(f"rank {rank}: can't receive into a tensor whose elements share memory, "
                          f"as an expanded one's do; receive into a copy (x.contiguous())")


def swapped(op: Op) -> Op:
    """Swap the operands of `op`; named ops commute, so they stay as they are."""
    return (lambda a, b: op(b, a)) if callable(op) else op


def identity(x: torch.Tensor, op: Op) -> torch.Tensor:
    """Fill `x`, in place, with what changes nothing under `op`; a function's is not known."""
    if callable(op) or x.is_meta:
        return x
    if op in ("max", "min") and x.dtype.is_floating_point:
        limit = torch.finfo(x.dtype).max if x.dtype in FINITE else torch.inf
        return x.fill_(-limit if op == "max" else limit)
    if op in ("max", "min") and x.dtype != torch.bool:
        info = torch.iinfo(x.dtype)
        return x.fill_(info.min if op == "max" else info.max)
    return x.fill_({"sum": 0, "avg": 0, "prod": 1, "max": 0, "min": 1}[op])
