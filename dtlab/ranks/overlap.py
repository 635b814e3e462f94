"""Would a receive overwrite what its rank is sending, or receiving, in another message?"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from dtlab.comm import Comm, Recv, Send
from dtlab.errors import ConfigError
from dtlab.reduction import not_dense, span_bytes


class Extent(NamedTuple):
    """The memory that one side of a message reads or writes: from the address `start` to `end`,
    with gaps if `x` has them. Once `x` is gone, so is the message."""

    start: int
    end: int
    receives: bool
    x: weakref.ref[torch.Tensor]


def extent_of(x: Any, receives: bool) -> Extent | None:
    """Return the memory of `x`; None if that is no dense tensor with elements."""
    if not isinstance(x, torch.Tensor) or x.is_meta or not x.numel() or not_dense(x):
        return None
    return Extent(x.data_ptr(), x.data_ptr() + span_bytes(x), receives, weakref.ref(x))


def check_overlap(comm: Comm, ops: Sequence[Send | Recv],
                  under_way: Collection[Extent] = ()) -> None:
    """Raise `ConfigError` if a receive would overwrite what is sent or received in the same batch,
    or what is `under_way`: posted by this rank, which has not waited for it. A collective's own
    messages are compared only while others are under way."""
    if not under_way and (comm.in_collective or len(ops) < 2):
        return
    before: list[Extent] = []  # those that end behind the start of the next one
    extents = [extent_of(op[0], isinstance(op, Recv)) for op in ops]
    for new in sorted(filter(None, extents), key=lambda extent: extent.start):
        before = [other for other in before if other.end > new.start]
        for other in before:
            _check_pair(comm.rank, new, other, "")
        for other in [o for o in under_way if o.start < new.end and new.start < o.end]:
            _check_pair(comm.rank, new, other, ", or wait for the first")
        before.append(new)


def _check_pair(rank: int, one: Extent, other: Extent, remedy: str) -> None:
    both, x, y = one.receives + other.receives, one.x(), other.x()
    if both and x is not None and y is not None and np.shares_memory(_addresses(x), _addresses(y)):
        raise ConfigError(f"rank {rank}: " + (
            "receives two messages into the same memory, where one would overwrite the other, so "
            "receive each into a tensor of its own" if both == 2 else
            "receives into the tensor that it is sending; what arrives may overwrite what has not "
            "left yet, so receive into another tensor") + remedy)


def _addresses(x: torch.Tensor) -> Any:
    """An array that lies where `x` does, of no dtype in particular."""
    return np.asarray(SimpleNamespace(__array_interface__={
        "version": 3, "typestr": f"|V{x.itemsize}", "data": (x.data_ptr(), True),
        "shape": tuple(x.shape), "strides": tuple(step * x.itemsize for step in x.stride())}))
