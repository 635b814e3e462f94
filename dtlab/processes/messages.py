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
_NOTHING = torch.empty(0)


class Message(Work):
    """One side of one message, from `post` until `wait`. Afterwards a line of the trace."""

    __slots__ = (
        "comm", "context", "done_s", "handles", "label", "nbytes", "number", "peer", "peers",
        "posted_s", "sends", "target", "visible", "wire", "world",
    )

    def __init__(self, comm: GlooComm, sends: bool, peer: int, target: Any, wire: torch.Tensor):
        self.comm, self.sends, self.peer, self.target, self.wire = comm, sends, peer, target, wire
        self.world = comm.members[peer] if peer >= 0 else ANYONE
        self.nbytes = 0
        self.context, self.label, self.visible = comm.context, comm.label, comm.visible
        self.number = -1
        self.handles: tuple[Any, ...] = ()  # Gloo's
        self.peers: tuple[int, ...] = (self.world,)  # of all messages that were posted together
        self.posted_s = self.done_s = 0.0

    def wait(self) -> int:
        """Block until it is sent, or received into its place. Returns the peer's rank."""
        if self.done_s:
            return self.peer
        end = self.comm.end
        end.blocked(self)
        try:
            for handle in self.handles:
                handle.wait()
            if not self.sends:
                self._receive()
        finally:
            end.runs()
        self.done_s = time.perf_counter()
        end.done(self)
        self.handles, self.target, self.wire = (), None, _NOTHING
        return self.peer

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
