"""Transports: they move bytes between processes, and know nothing else.

A transport starts a batch of operations, each (sends?, tensor, rank of the run, tag), and returns a
handle for each; `handle.wait()` blocks until the bytes have moved. Tensors are dense, contiguous,
on the transport's device, and hold at least one byte; both sides give the same number of bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch

from dtlab.errors import ConfigError

ANY_SOURCE = -1
WATCHING = "watched handle"  # the name of threads that wait for one message
Operation = tuple[bool, torch.Tensor, int, int]

_KEPT_HANDLES = 4
_KEPT_BYTES = 1 << 20  # of tensors that nobody needs any more


class Handle(Protocol):
    """An operation under way."""

    def wait(self) -> object:
        """Block until it is done. Raises `RuntimeError` if the connection has broken."""


class Transport(Protocol):
    """The methods of a transport that the communicator calls."""

    def start(self, operations: Sequence[Operation]) -> list[Any]:
        """Start all `operations` together. Returns their handles, in the same order."""

    def release(self, handles: Sequence[Any], nbytes: int) -> None:
        """Release these handles, of operations on `nbytes` in all."""


class GlooTransport:
    """Moves CPU tensors over Gloo: one socket for each pair of processes."""

    def __init__(self, group: Any, ranks: Sequence[int] | None = None):
        self._group = group  # torch's ProcessGroupGloo
        self._ranks = ranks  # of the run, in the group's order; None: the same
        self._released: deque[tuple[Any, int]] = deque()
        self._released_bytes = 0

    def start(self, operations: Sequence[Operation]) -> list[Any]:
        """See `Transport`."""
        # The destructor of a Gloo handle waits for Gloo's thread, which has only just woken this
        # one: dropped at once it would cost a turn of the scheduler. Here it is free.
        while len(self._released) > _KEPT_HANDLES:
            self._released_bytes -= self._released.popleft()[1]
        return [self._start(*operation) for operation in operations]

    def _start(self, sends: bool, x: torch.Tensor, peer: int, tag: int) -> Any:
        if self._ranks is not None and peer != ANY_SOURCE:
            peer = self._ranks.index(peer)
        try:
            if sends:
                return self._group.send([x], peer, tag)
            if peer == ANY_SOURCE:
                handle = self._group.recv_anysource([x], tag)
                return handle if self._ranks is None else _Renumbered(handle, self._ranks)
            return self._group.recv([x], peer, tag)
        except RuntimeError as error:
            # A connection may break before or after an operation starts: `wait` raises in both
            # cases.
            return _Broken(error)

    def release(self, handles: Sequence[Any], nbytes: int) -> None:
        """See `Transport`."""
        self._released.append((handles, nbytes))
        self._released_bytes += nbytes
        while self._released_bytes > _KEPT_BYTES:
            self._released_bytes -= self._released.popleft()[1]


    def close(self) -> None:
        """Let the group go: a thread that still knows this transport must not keep it."""
        self._group = _Closed()
        self._released.clear()


class _Renumbered:
    """The handle of a receive from any source in a group whose ranks have other numbers."""

    def __init__(self, handle: Any, ranks: Sequence[int]):
        self._handle, self._ranks = handle, ranks

    def wait(self) -> None:
        self._handle.wait()

    def _source_rank(self) -> int:
        rank: int = self._ranks[self._handle._source_rank()]
        return rank


class _Closed:
    """Stands for a group that was let go."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ConfigError("this communicator is closed: its run has ended, or its process group "
                          "was destroyed")


class _Broken:
    """Stands for the handle of an operation that Gloo refused: the connection has broken."""

    def __init__(self, error: RuntimeError):
        self._error = error

    def wait(self) -> NoReturn:
        raise self._error


class WatchedHandle:
    """A handle that a thread waits for, so that others can ask whether it is done.

    start: starts a thread that runs a function of this name.
    """

    def __init__(self, handle: Any, start: Callable[[Callable[[], None], str], object]):
        self._handle = handle
        self.error: Exception | None = None
        self._listeners: list[threading.Event] = []
        self.over = threading.Event()
        start(self._wait, WATCHING)

    def wait(self) -> None:
        """See `Handle`."""
        self.over.wait()
        if self.error is not None:
            raise self.error

    def notify(self, listener: threading.Event) -> list[threading.Event]:
        """Set `listener` once it is over, unless it is taken out of the returned list before."""
        self._listeners.append(listener)
        if self.over.is_set():
            listener.set()
        return self._listeners

    def _source_rank(self) -> int:
        return self._handle._source_rank()  # type: ignore[no-any-return]

    def _wait(self) -> None:
        try:
            self._handle.wait()
        except Exception as error:  # mostly, the connection has broken
            self.error = error
        self.over.set()
        for listener in [*self._listeners]:
            listener.set()
