"""The communicator of real processes: messages over Gloo, one socket a pair of ranks.

Gloo's own send and receive do the moving. Around them: numbered contexts, so that communicators
don't mix; the ledger, so that a message that does not fit is refused; the board, so that a wait
has a name; and the trace.
"""

from __future__ import annotations

import pickle
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import cloudpickle
import torch

from dtlab.comm import Comm, Recv, Send, Work
from dtlab.errors import ConfigError
from dtlab.matching import describe
from dtlab.processes.board import ANYONE, COMPUTE, RUNNING
from dtlab.processes.endpoint import Endpoint
from dtlab.processes.ledger import encode
from dtlab.reduction import combine_

_TAG = 1 << 20  # below are the tags that learners use with torch.distributed itself
_FRAME = struct.Struct("<QI")  # an object's pickled length, and the tag of what is too long
_FRAME_BYTES = 256  # an object travels in a frame of this size, if it fits


class Message(Work):
    """One side of one message, from `post` until `wait`. Afterwards a line of the trace."""

    __slots__ = (
        "batch", "comm", "context", "done_s", "handles", "label", "nbytes", "number", "peer",
        "posted_s", "sends", "target", "visible", "wire", "world",
    )

    def __init__(self, comm: GlooComm, sends: bool, peer: int, target: Any, wire: torch.Tensor):
        self.comm, self.sends, self.peer, self.target, self.wire = comm, sends, peer, target, wire
        self.world = comm.members[peer] if peer >= 0 else ANYONE
        self.nbytes = wire.nbytes
        self.context, self.label, self.visible = comm.context, comm.label, comm.visible
        self.number = -1
        self.handles: tuple[Any, ...] = ()  # Gloo's
        self.batch: Sequence[Message] = (self,)
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
            end.say(RUNNING)
        self.done_s = time.perf_counter()
        end.done(self)
        self.handles, self.target, self.batch = (), None, ()
        self.wire = _NOTHING
        if self.sends:
            self.comm.open_sends[self.peer] -= 1
        return self.peer

    def _receive(self) -> None:
        """What has arrived in `wire` goes where it was wanted."""
        if self.peer < 0:
            self.world = self.handles[0]._source_rank()
            self.comm.found_sender(self)
        if isinstance(self.target, list):
            self.target.append(self._object())
        elif self.target is not self.wire:
            self.target.detach().copy_(self.wire.view(self.target.shape))

    def _object(self) -> Any:
        """The object whose frame has arrived; if it was too long for a frame, the rest follows."""
        frame = self.wire.numpy().tobytes()
        self.nbytes, tag = _FRAME.unpack_from(frame)
        if not tag:
            return pickle.loads(frame[_FRAME.size : _FRAME.size + self.nbytes])
        payload = torch.empty(self.nbytes, dtype=torch.uint8)
        rest = self.comm.end.group.recv([payload], self.world, tag)
        rest.wait()
        self.handles += (rest,)
        return pickle.loads(payload.numpy().data)


class GlooComm(Comm):
    """A group of ranks, each a process. `members[r]` is the rank r's number in the whole run."""

    def __init__(self, end: Endpoint, members: list[int], context: int = 0, visible: bool = True):
        self.end, self.members, self.context, self.visible = end, members, context, visible
        self.rank, self.size, self.device = members.index(end.rank), len(members), end.device
        self.open_sends = [0] * self.size
        self._tag = _TAG + context
        self._sent = [0] * self.size  # messages posted so far, by peer
        self._received = [0] * self.size
        self._anyone: dict[Message, bytes] = {}  # pending receives from anyone, their headers
        self._headers: dict[Any, bytes] = {}
        self._hidden: GlooComm | None = None  # for `_agree`; contexts come in pairs

    # ---- messages -------------------------------------------------------------------------------

    def post(self, *ops: Send | Recv) -> list[Work]:
        """Start all of `ops` together and return at once; wait for each with `Work.wait`."""
        for op in ops:
            self._check(op)
        messages: dict[int, Message] = {}
        for place, op in enumerate(ops):  # a message that finds its buffer ready moves at once
            if isinstance(op, Recv):
                messages[place] = self._recv(op.x, op.src)
        for place, op in enumerate(ops):
            if isinstance(op, Send):
                messages[place] = self._send(op.x, op.dst)
        batch = [messages[place] for place in range(len(ops))]
        for message in batch:
            message.batch = batch
        return list(batch)

    def _check(self, op: Send | Recv) -> None:
        if isinstance(op, Send):
            self._check_peer(op.dst, "send to")
        else:
            self._check_peer(op.src, "receive from")
            if not isinstance(op.x, (torch.Tensor, list)):
                raise ConfigError(
                    f"rank {self.rank}: can't receive into a {type(op.x).__name__}; give a tensor, "
                    f"a list that takes an object, or call recv_object"
                )
        if isinstance(op.x, torch.Tensor):
            self._check_tensor(op.x)

    def _check_tensor(self, x: torch.Tensor) -> None:
        if x.device != self.device:
            raise ConfigError(
                f"rank {self.rank}: the tensor is on {x.device}, this communicator works on "
                f"{self.device}; move it with x.to(comm.device)"
            )
        if x.layout is not torch.strided or x.is_quantized:
            raise ConfigError(
                f"rank {self.rank}: can't send or receive a {x.layout} tensor; make it dense"
            )

    def _send(self, x: Any, dst: int) -> Message:
        payload = None
        if isinstance(x, torch.Tensor):
            wire = x if _is_direct(x) else _direct_copy(x)
            message = Message(self, True, dst, None, wire)
        else:
            wire, payload, nbytes, tag = self._frame(x)
            message = Message(self, True, dst, None, wire)
            message.nbytes = nbytes
        end, group = self.end, self.end.group
        with end.lock:
            message.number = number = self._sent[dst]
            if end.ledger:
                first, header = not self.open_sends[dst], self._header(x)
                end.ledger.send(message.world, self.context, number, header, first=first)
            self._sent[dst] += 1
            self.open_sends[dst] += 1
            message.posted_s = time.perf_counter()
            message.handles = (group.send([wire], message.world, self._tag),)
            if payload is not None:
                message.handles += (group.send([payload], message.world, tag),)
            end.posted(message)
        return message

    def _recv(self, x: Any, src: int | None) -> Message:
        if isinstance(x, list):
            wire = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        elif _is_direct(x):
            wire = x
        else:
            wire = torch.empty(x.shape, dtype=x.dtype)
        message = Message(self, False, ANYONE if src is None else src, x, wire)
        end, group = self.end, self.end.group
        with end.lock:
            self._enter(message, self._header(x) if end.ledger else b"")
            message.posted_s = time.perf_counter()
            if src is None:
                message.handles = (group.recv_anysource([wire], self._tag),)
            else:
                message.handles = (group.recv([wire], message.world, self._tag),)
            end.posted(message)
        return message

    def _frame(self, x: Any) -> tuple[torch.Tensor, torch.Tensor | None, int, int]:
        """An object as (frame, payload, bytes, tag); None and 0 if the frame holds it."""
        pickled = cloudpickle.dumps(x)
        frame = bytearray(_FRAME_BYTES)
        if len(pickled) <= _FRAME_BYTES - _FRAME.size:
            _FRAME.pack_into(frame, 0, len(pickled), 0)
            frame[_FRAME.size : _FRAME.size + len(pickled)] = pickled
            return torch.frombuffer(frame, dtype=torch.uint8), None, len(pickled), 0
        tag = self.end.payload_tag()
        _FRAME.pack_into(frame, 0, len(pickled), tag)
        payload = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        return torch.frombuffer(frame, dtype=torch.uint8), payload, len(pickled), tag

    # ---- the ledger's numbers -------------------------------------------------------------------

    def _header(self, x: Any) -> bytes:
        tensor = isinstance(x, torch.Tensor)
        key = (x.dtype, x.shape, self.label) if tensor else self.label
        header = self._headers.get(key)
        if header is None:
            if len(self._headers) > 1000:
                self._headers.clear()
            header = self._headers[key] = encode(describe(x, self.label))
        return header

    def _enter(self, message: Message, header: bytes) -> None:
        """Number a receive, and let the ledger refuse it."""
        ledger, src = self.end.ledger, message.peer
        if src >= 0:
            message.number = self._received[src]
            if ledger:  # with receives from anyone about, its number is not certain
                known = b"" if self._anyone else header
                ledger.recv(message.world, self.context, message.number, known)
            self._received[src] += 1
            return
        self._anyone[message] = header
        if ledger:
            taken = dict(zip(self.members, self._received, strict=True))
            pending, same = self._pending_anyone()
            try:
                ledger.recv_anyone(taken, self.context, pending, same)
            except Exception:
                del self._anyone[message]
                raise

    def found_sender(self, message: Message) -> None:
        """A receive from anyone has been met: count it as that sender's."""
        with self.end.lock:
            message.peer = src = self.members.index(message.world)
            message.number = self._received[src]
            self._received[src] += 1
            del self._anyone[message]
            if self.end.ledger:
                self.end.ledger.took(
                    message.world, self.context, self._received[src], *self._pending_anyone()
                )

    def _pending_anyone(self) -> tuple[int, bytes]:
        """How many receives from anyone are pending, and their header, if all have the same."""
        headers = set(self._anyone.values())
        return len(self._anyone), headers.pop() if len(headers) == 1 else b""

    # ---- the rest of the page -------------------------------------------------------------------

    @contextmanager
    def compute(self, label: str, seconds: float = 0.0) -> Iterator[None]:
        """Mark the work done inside as a span of the trace; it takes what it takes."""
        self.end.say(COMPUTE, label)
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.end.span("compute", start_s, time.perf_counter(), label)
            self.end.say(RUNNING)

    def accumulate_(self, into: torch.Tensor, x: torch.Tensor, op: Any = "sum") -> torch.Tensor:
        """into ← into op x, in place, as a span of the trace. Returns `into`."""
        start_s = time.perf_counter()
        combine_(into, x, op)
        self.end.span("reduce", start_s, time.perf_counter(), self.label)
        return into

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.end.start_s

    def __reduce__(self) -> NoReturn:
        raise TypeError("a communicator can't leave its rank")

    def _agree(self, value: Any) -> list[Any]:
        """Everyone's `value`, by rank, through rank 0. On messages that no trace shows."""
        if self._hidden is None:
            self._hidden = GlooComm(self.end, self.members, self.context + 1, visible=False)
            self._hidden.label = "split"
        hidden = self._hidden
        if self.rank:
            hidden.send(value, 0)
            values: list[Any] = hidden.recv_object(0)
            return values
        values = [value] + [hidden.recv_object(peer) for peer in range(1, self.size)]
        for peer in range(1, self.size):
            hidden.send(values, peer)
        return values

    def _subgroup(self, ranks: Sequence[int], context: int) -> GlooComm:
        self.end.next_context = max(self.end.next_context, context + 1)
        return GlooComm(self.end, [self.members[rank] for rank in ranks], 2 * context)

    def _next_context(self) -> int:
        return self.end.next_context


_NOTHING = torch.empty(0)


def _direct_copy(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` that Gloo can read."""
    return x.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _is_direct(x: torch.Tensor) -> bool:
    """Can Gloo read and write the memory of `x` as it is?"""
    return x.is_contiguous() and x.is_cpu and not x.is_conj() and not x.is_neg()
