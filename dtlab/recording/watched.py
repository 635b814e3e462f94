"""A communicator that records what every buffer of an algorithm held, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from dtlab.comm import Comm, Recv, Send, Work
from dtlab.machine import Machine


class BufferRegion(NamedTuple):
    """The place of a tensor: `memory` is the address of its storage, the rest counts elements."""

    memory: int
    first: int
    length: int


class Posted(NamedTuple):
    """One side of a message: with which rank of the whole run, when it was posted, where its data
    lay; and, at the sender, a copy of them."""

    peer: int | None
    when_s: float
    region: BufferRegion | None
    data: torch.Tensor | None = None


class Notes:
    """The record of one rank: every buffer it sent, received into or added to, after each change.

    history[memory]: (when, copy of the whole buffer), oldest first.
    sent, received: its side of every message, in the order in which they were posted.
    """

    def __init__(self) -> None:
        self.history: dict[int, list[tuple[float, torch.Tensor]]] = {}
        self.sent: list[Posted] = []
        self.received: list[Posted] = []
        self._buffers: dict[int, torch.Tensor] = {}  # held, so that no address is used twice

    def watch(self, tensor: Any, now: float) -> None:
        """Note from now on what the buffer of `tensor` holds."""
        tensor = as_floats(tensor)
        where = region_of(tensor)
        if where is not None and where.memory not in self._buffers:
            whole = tensor.detach().new_empty(0).set_(tensor.untyped_storage())
            self._buffers[where.memory] = whole
            self.history[where.memory] = [(now, _copied(whole))]

    def look(self, now: float) -> None:
        """Note what each watched buffer holds, if that has changed."""
        for memory, buffer in self._buffers.items():
            held = _copied(buffer)
            if not torch.equal(self.history[memory][-1][1], held):
                self.history[memory].append((now, held))


def _copied(buffer: torch.Tensor) -> torch.Tensor:
    """Return a copy in which memory not yet written (NaN, see `unwritten_is_nan`) is 0."""
    return buffer.nan_to_num(0.0, 0.0, 0.0) if buffer.is_floating_point() else buffer.clone()


def as_floats(x: Any) -> Any:
    """Return `x`; if it is a row of bytes, the float32 numbers that they stand for: some algorithms
    move elements as bytes."""
    if (isinstance(x, torch.Tensor) and x.dtype == torch.uint8 and x.is_contiguous()
            and x.numel() % 4 == x.storage_offset() % 4 == 0):
        return x.detach().view(-1).view(torch.float32)
    return x


def region_of(tensor: Any) -> BufferRegion | None:
    """Return the place of a tensor's data; None for other objects, empty and scattered tensors."""
    tensor = as_floats(tensor)
    if not isinstance(tensor, torch.Tensor) or not tensor.numel() or not tensor.is_contiguous():
        return None
    return BufferRegion(tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()),
                        tensor.numel())


class WatchedComm(Comm):
    """`inner`, with every message, wait and reduction noted in `notes`. Changes nothing else.

    members[i]: the rank, in the whole run, of the i-th rank of `inner`. Groups, collectives and
    streams of this communicator are watched, too.
    """

    def __init__(self, inner: Comm, notes: Notes, members: Sequence[int]):
        super().__init__(inner.rank, inner.size, inner.device)
        self.inner, self.notes, self.members = inner, notes, members

    def post(self, *ops: Send | Recv) -> list[Work]:
        now = self.now()
        self.notes.look(now)  # what was copied since the last message
        works = [_WatchedWork(work, self) for work in self.inner.post(*ops)]  # checks the peers
        for op in ops:
            self.notes.watch(op.x, now)
            if isinstance(op, Send):
                data = as_floats(op.x).clone() if isinstance(op.x, torch.Tensor) else None
                self.notes.sent.append(Posted(self.members[op.dst], now, region_of(op.x), data))
            else:
                src = None if op.src is None else self.members[op.src]
                self.notes.received.append(Posted(src, now, region_of(op.x)))
        return list(works)

    def wait_any(self, works: Sequence[Work], timeout_s: float | None = None) -> Work | None:
        watched = {id(work.inner): work for work in works if isinstance(work, _WatchedWork)}
        done = self.inner.wait_any([work.inner for work in watched.values()], timeout_s)
        self.notes.look(self.now())
        return watched[id(done)] if done else None

    def begin(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Work:
        def watched(stream: Comm, *args: Any, **options: Any) -> Any:
            return fn(WatchedComm(stream, self.notes, self.members), *args, **options)

        return _WatchedWork(self.inner.begin(watched, *args, **options), self)

    def accumulate_(self, into: torch.Tensor, x: torch.Tensor, op: Any = "sum") -> torch.Tensor:
        self.notes.watch(into, 0.0)  # a sum begins with what its buffer held from the start
        self.inner.accumulate_(into, x, op)
        self.notes.look(self.now())
        return into

    def compute(self, label: str, seconds: float = 0.0) -> AbstractContextManager[None]:
        return self.inner.compute(label, seconds)

    def now(self) -> float:
        return self.inner.now()

    @property
    def machine(self) -> Machine:
        return self.inner.machine

    def labelled(self, label: str) -> WatchedComm:
        named = super().labelled(label)
        named.inner = self.inner.labelled(label)
        return named

    def _all_gather_objects(self, value: Any) -> list[Any]:
        return self.inner._all_gather_objects(value)

    def _make_group(self, ranks: Sequence[int], context: tuple[Any, ...]) -> Comm:
        group = self.inner._make_group(ranks, context)
        return WatchedComm(group, self.notes, [self.members[rank] for rank in ranks])


class _WatchedWork(Work):
    def __init__(self, inner: Work, comm: WatchedComm):
        self.inner, self.comm = inner, comm

    def wait(self) -> Any:
        result = self.inner.wait()
        self.comm.notes.look(self.comm.now())
        return result

    def cancel(self) -> None:
        self.inner.cancel()
