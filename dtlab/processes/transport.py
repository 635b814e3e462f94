"""Transports move bytes between processes.

A transport starts a batch of operations, each (sends?, tensor, rank of the run, tag), and returns a
handle for each; `handle.wait()` blocks until the bytes have moved. Tensors are dense, contiguous,
on the transport's device, and hold at least one byte; both sides give the same number of bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, Protocol

import torch

from dtlab.errors import ConfigError

ANY_SOURCE = -1
WATCHING = "watched handle"  # the name of threads that wait for one message
Operation = tuple[bool, torch.Tensor, int, int]

_KEPT_HANDLES = 4
_KEPT_BYTES = 1 << 20  # of the tensors of these handles


class TransportHandle(Protocol):
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
        # thread: destroying the handle later costs less.
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
        """Drop the reference to the group: threads may keep this transport alive."""
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
    """Replaces the group of a closed transport."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ConfigError("this communicator is closed: its run has ended, or its process group "
                          "was destroyed")


class _Broken:
    """Replaces the handle of an operation that Gloo refused: the connection has broken."""

    def __init__(self, error: RuntimeError):
        self._error = error

    def wait(self) -> NoReturn:
        raise self._error


class WatchedHandle:
    """A handle for which a thread waits; `future` is done when the handle is.

    start: starts a thread that runs a function of this name.
    """

    def __init__(self, handle: Any, start: Callable[[Callable[[], None], str], object]):
        self._handle = handle
        self.future: Future[None] = Future()
        start(self._wait, WATCHING)

    def wait(self) -> None:
        """See `TransportHandle`."""
        self.future.result()

    def _source_rank(self) -> int:
        return self._handle._source_rank()  # type: ignore[no-any-return]

    def _wait(self) -> None:
        try:
            self._handle.wait()
        except Exception as error:  # mostly, the connection has broken
            self.future.set_exception(error)
        else:
            self.future.set_result(None)
