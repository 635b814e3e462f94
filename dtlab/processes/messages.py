"""One side of one message over Gloo."""

from __future__ import annotations

import pickle
import struct
import time
from typing import TYPE_CHECKING, Any

import torch

from dtlab.comm import Work
from dtlab.processes.board import ANYONE

if TYPE_CHECKING:
    from dtlab.processes.communicator import GlooComm

FRAME = struct.Struct("<QI")  # an object's pickled length, and the tag of what is too long
FRAME_BYTES = 256  # an object travels in a frame of this size, if it fits


class Message(Work):
    """One side of one message, from `post` until `wait`. Afterwards a line of the trace.

    `peer` is a rank of the communicator, `world` the same of the whole run; `wire` is what Gloo
    reads or writes, `target` where a received message goes.
    """

    __slots__ = (
        "comm", "context", "done_s", "handles", "label", "nbytes", "number", "peer", "peers",
        "posted_s", "sends", "target", "wire", "world",
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
        for handle in self.handles:
            handle.wait()
        if not self.sends:
            self._receive()
        self.done_s = time.perf_counter()
        self.comm.end.done(self)
        self.handles, self.wire, self.target = (), None, None

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
        frame = self.wire.numpy().tobytes()
        self.nbytes, tag = FRAME.unpack_from(frame)
        if not tag:
            return pickle.loads(frame[FRAME.size : FRAME.size + self.nbytes])
        payload = torch.empty(self.nbytes, dtype=torch.uint8)
        rest = self.comm.end.group.recv([payload], self.world, tag)
        rest.wait()
        self.handles += (rest,)
        return pickle.loads(payload.numpy().data)
