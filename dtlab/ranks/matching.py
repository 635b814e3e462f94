"""Do a send and the receive that meets it fit together? Every communicator asks here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from dtlab.comm import Comm, Recv, Send
from dtlab.errors import ConfigError, ShapeMismatch
from dtlab.reduction import not_dense


class Header(NamedTuple):
    """The description of a message by one of its sides."""

    kind: str  # "tensor" | "object"
    dtype: str = ""  # "float32"
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    label: str = ""  # the collective it is part of, "" if none

    def __str__(self) -> str:
        if self.kind == "object":
            return "an object"
        return f"{self.dtype} {self.shape}"


def describe(x: Any, label: str = "") -> Header:
    """The header of a message that carries, or is received into, `x`."""
    if isinstance(x, torch.Tensor):
        return Header("tensor", str(x.dtype).split(".")[-1], tuple(x.shape), x.nbytes, label)
    return Header("object", label=label)


def check_sources(rank: int, named: bool, anyone: Iterable[Header]) -> None:
    """Raise `ConfigError` if receives from anyone, which `anyone` describes, would be under way
    together and differ, or beside one that names its sender (`named`)."""
    kinds = sorted({f"{header}{' in ' * bool(header.label)}{header.label}" for header in anyone})
    if kinds and (named or len(kinds) > 1):
        other = "one that names its sender" if named else f"one of {kinds[-1]}"
        raise ConfigError(
            f"rank {rank}: a receive of {kinds[0]} from anyone is under way beside {other}, so "
            f"which message each meets depends on who comes first; wait for one before you post "
            f"the other, or let one have its own communicator: comm.subgroup(range(comm.size))"
        )


def check_overlap(comm: Comm, ops: Sequence[Send | Recv],
                  under_way: Collection[Send | Recv] = ()) -> None:
    """Raise `ConfigError` if a receive would overwrite what is sent or received in the same batch,
    or what is `under_way`: posted by this rank, which has not waited for it. Of what collectives do
    themselves nothing is asked."""
    if not under_way and (comm.in_collective or len(ops) < 2):
        return
    ops = *under_way, *ops
    before: list[tuple[int, Send | Recv]] = []  # by their ends, behind the start of the next one
    for start, end, number in sorted((*_span(op[0]), number) for number, op in enumerate(ops)
                                     if _has_memory(op[0])):
        op, before = ops[number], [other for other in before if other[0] > start]
        for _, other in before:
            both = isinstance(op, Recv) + isinstance(other, Recv)
            if both and np.shares_memory(_addresses(op[0]), _addresses(other[0])):
                raise ConfigError(f"rank {comm.rank}: " + (
                    "receives two messages into the same memory, where one would overwrite the "
                    "other, so receive each into a tensor of its own" if both == 2 else
                    "receives into the tensor that it is sending; what arrives may overwrite what "
                    "has not left yet, so receive into another tensor") + (
                    ", or wait for the first" if under_way else ""))
        before.append((end, op))


def _has_memory(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not x.is_meta and x.numel() > 0 and not not_dense(x)


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The addresses where the first element of `x` begins and its last one ends."""
    start = x.data_ptr()
    if x.is_contiguous():
        return start, start + x.nbytes
    steps = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return start, start + (steps + 1) * x.itemsize


def _addresses(x: torch.Tensor) -> Any:
    """An array that lies where `x` does, of no dtype in particular."""
    return np.asarray(SimpleNamespace(__array_interface__={
        "version": 3, "typestr": f"|V{x.itemsize}", "data": (x.data_ptr(), True),
        "shape": tuple(x.shape), "strides": tuple(step * x.itemsize for step in x.stride())}))


def check_match(sent: Header, src: int, wanted: Header, dst: int) -> None:
    """Raise `ShapeMismatch` unless what `src` sent is what `dst` has made room for."""
    if sent.label != wanted.label:
        raise ShapeMismatch(
            f"rank {src} is in {sent.label or 'a plain send'}, "
            f"but rank {dst} is in {wanted.label or 'a plain recv'}; "
            f"all ranks must make the same calls, in the same order, with equal arguments"
        )
    if sent.kind != wanted.kind:
        verb = "recv_object" if sent.kind == "object" else "recv into a tensor"
        raise ShapeMismatch(
            f"rank {src} sent {sent}, but rank {dst} waits to receive {wanted}; use {verb}"
        )
    if sent.kind == "tensor" and (sent.dtype, sent.shape) != (wanted.dtype, wanted.shape):
        raise ShapeMismatch(
            f"rank {src} sent {sent}, but rank {dst} waits to receive {wanted}; "
            f"make shape and dtype equal on both sides"
        )
