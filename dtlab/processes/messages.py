"""One side of one message over Gloo."""

from __future__ import annotations

import io
import pickle
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import cloudpickle
import torch

from dtlab.comm import Work
from dtlab.errors import RankDied
from dtlab.processes.board import ANYONE
from dtlab.processes.watch import Watch

if TYPE_CHECKING:
    from dtlab.processes.communicator import GlooComm

FRAME = struct.Struct("<QI")  # an object's pickled length, and the tag of what is too long
FRAME_BYTES = 8192  # an object travels in a frame of up to this size, if it fits
_SPARE_FRAMES = 64


class _Plain(pickle.Pickler):
    """Pickles what is made of Python's own types alone: that needs no look at where code lives."""

    def reducer_override(self, x: Any) -> NoReturn:
        raise pickle.PicklingError


def pickled(x: Any) -> bytes:
    """`x` as bytes, for `pickle.loads`."""
    file = io.BytesIO()
    try:
        _Plain(file, -1).dump(x)
        return file.getvalue()
    except pickle.PicklingError:
        return cloudpickle.dumps(x)  # type: ignore[no-any-return]


def framed(
    x: Any, next_tag: Callable[[], int]
) -> tuple[torch.Tensor, torch.Tensor | None, int, int]:
    """An object as (frame, payload, bytes, tag); None and 0 if the frame holds it."""
    data = pickled(x)
    if len(data) <= FRAME_BYTES - FRAME.size:
        frame = bytearray(FRAME.pack(len(data), 0) + data)
        return torch.frombuffer(frame, dtype=torch.uint8), None, len(data), 0
    tag = next_tag()
    frame = bytearray(FRAME.pack(len(data), tag))
    payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return torch.frombuffer(frame, dtype=torch.uint8), payload, len(data), tag


class Frames:
    """Memory for frames that are to come, used again and again."""

    def __init__(self) -> None:
        self._spare: list[tuple[torch.Tensor, memoryview]] = []

    def take(self) -> tuple[torch.Tensor, memoryview]:
        """A frame as Gloo sees it, and as Python does."""
        try:
            return self._spare.pop()
        except IndexError:
            memory = bytearray(FRAME_BYTES)
            return torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory)

    def give_back(self, wire: torch.Tensor, view: memoryview) -> None:
        """Nobody needs this frame any more."""
        if len(self._spare) < _SPARE_FRAMES:
            self._spare.append((wire, view))


class Broken:
    """Stands for Gloo's handle of a receive that it would not take: the connection has broken."""

    def __init__(self, error: RuntimeError):
        self._error = error

    def wait(self) -> NoReturn:
        """Raise what Gloo raised."""
        raise self._error


def receiving(post: Callable[..., Any], *args: Any) -> Any:
    """The handle of a receive. Whether its connection breaks before or after it is posted is
    chance; so whoever waits for it is told, in both cases."""
    try:
        return post(*args)
    except RuntimeError as error:
        return Broken(error)


class Message(Work):
    """One side of one message, from `post` until `wait`. Afterwards a line of the trace.

    `peer` is a rank of the communicator, `world` the same of the whole run; `wire` is what Gloo
    reads or writes, `target` where a received message goes.
    """

    __slots__ = (
        "comm", "context", "done_s", "frame", "handles", "label", "nbytes", "number", "peer",
        "peers", "posted_s", "sends", "target", "watch", "wire", "world",
    )

    def __init__(
        self, comm: GlooComm, sends: bool, peer: int, wire: Any, target: Any, nbytes: int
    ):
        self.comm, self.sends, self.peer, self.nbytes = comm, sends, peer, nbytes
        self.wire, self.target = wire, target
        self.world = comm.members[peer] if peer >= 0 else ANYONE
        self.context, self.label = comm.context, comm.label
        self.number = -1  # it is the number-th message of this pair and context
        self.handles: tuple[Any, ...] = ()  # Gloo's
        self.peers: tuple[int, ...] = (self.world,)  # of all messages that were posted together
        self.posted_s = self.done_s = 0.0
        self.frame: memoryview | None = None  # of an object that comes, the memory of `wire`
        self.watch: Watch | None = None  # who waits for the handles, if it is not the caller

    def cancel(self) -> None:
        pass

    def arrived(self) -> bool:
        """Has it come, or will it never? See `dtlab.patience`."""
        return bool(self.done_s) or (self.watch is not None and self.watch.over.is_set())

    def wait(self) -> int:
        """Block until it is sent, or received into its place. Returns the peer's rank."""
        if not self.done_s:
            end = self.comm.end
            end.blocked(self)
            try:
                self.complete()
            finally:
                end.runs()
        return self.peer

    def complete(self) -> None:
        """Block until Gloo is done with it, without a word on the board."""
        if self.watch is None:
            for handle in self.handles:
                handle.wait()
            if not self.sends:
                self._receive()
        else:
            self._receive_watched(self.watch)
        self.done_s = time.perf_counter()
        self.comm.end.done(self)
        self.handles, self.wire, self.target = (), None, None

    def _receive_watched(self, watch: Watch) -> None:
        """As `complete`; but whoever waits with a limit wants to know that its peer is gone."""
        watch.over.wait()
        error = watch.error
        if error is None:
            try:
                self._receive()
            except RuntimeError as broken:  # the rest of a large object did not come
                error = broken
        if error is not None:
            who = f"rank {self.peer}" if self.peer >= 0 else "a rank"
            raise RankDied(f"rank {self.comm.rank}: the connection to {who} has broken",
                           self.peer) from error

    def _receive(self) -> None:
        """What has arrived in `wire` goes where it was wanted."""
        if self.peer < 0:
            self.world = self.handles[0]._source_rank()
            self.comm.met(self)
        if isinstance(self.target, list):
            self.target.append(self._object())
        elif self.target is not self.wire and self.nbytes:
            self.target.detach().copy_(self.wire.view(self.target.shape))

    def _object(self) -> Any:
        """The object whose frame has arrived; if it was too long for a frame, the rest follows."""
        frame, self.frame = self.frame, None
        assert frame is not None
        self.nbytes, tag = FRAME.unpack_from(frame)
        if not tag:
            x = pickle.loads(frame[FRAME.size : FRAME.size + self.nbytes])
            self.comm.end.frames.give_back(self.wire, frame)
            return x
        payload = torch.empty(self.nbytes, dtype=torch.uint8)
        rest = self.comm.end.group.recv([payload], self.world, tag)
        rest.wait()
        self.handles += (rest,)
        return pickle.loads(payload.numpy().data)
