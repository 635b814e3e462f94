"""A communicator whose messages cross a simulated network."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import torch

from dtlab.comm import Comm, Recv, Send, Work
from dtlab.errors import ConfigError
from dtlab.machine import Machine
from dtlab.reduction import Op, overlaps_itself
from dtlab.relay import one_by_one
from dtlab.simulator.engine import Engine
from dtlab.simulator.messages import Channel, Envelope, Inbox, Mailbox, Message, Receiving, Sending
from dtlab.simulator.strands import Errand, Stopped, Strand


class SimComm(Comm):
    """`ranks[i]` is, in the numbering of the whole run, the i-th member of this communicator."""

    def __init__(self, engine: Engine, strand: Strand, ranks: Sequence[int],
                 context: tuple[Any, ...] = ()):
        super().__init__(ranks.index(strand.rank), len(ranks), torch.device("cpu"))
        self._engine, self._strand = engine, strand
        self._ranks, self._context = ranks, context
        self._to = _Made(self._channel_to)
        self._from = _Made(self._channel_from)
        self._meetings = 0

    def post(self, *ops: Send | Recv) -> list[Sending | Receiving]:  # type: ignore[override]
        works: list[Sending | Receiving] = []
        for op in ops:
            if op.__class__ is Send:
                works.append(Sending(self._send(op[0], self._to[op[1]]), self._strand, op[1]))
            else:
                works.append(Receiving(self._recv(op[0], self._from[op[1]]), self._strand))
        return works

    def exchange(self, *ops: Send | Recv) -> None:
        # As in Comm, but all of them stand in the table if none comes.
        works = self.post(*ops)
        self._strand.waits_for = [work.message for work in works]
        for work in works:
            work.finish()

    def sendrecv(self, out: Any, dst: int, into: Any, src: int | None) -> None:
        # As in Comm, without its intermediate records: rings live in this call.
        sent, received = self._send(out, self._to[dst]), self._recv(into, self._from[src])
        strand = self._strand
        strand.waits_for = sent, received
        if not sent.left:
            sent.sender = strand
            strand.pause()
        if not received.arrived:
            received.receiver = strand
            strand.pause()

    def relay(
        self, chunks: Sequence[torch.Tensor], dst: int, src: int, op: Op, adding: int
    ) -> None:
        """See `dtlab.relay`. Without data there is nothing to be done on this strand."""
        if len(chunks) > 1 and all(chunk.is_meta for chunk in chunks):
            errand = Errand(self._strand, self._engine.wake)
            errand.run(self._steps(errand, chunks, self._to[dst], self._from[src], adding))
        else:
            one_by_one(self, chunks, dst, src, op, adding)

    def _steps(self, errand: Errand, chunks: Sequence[torch.Tensor], to: Channel,
               origin: Channel | Mailbox, adding: int) -> Iterator[None]:
        """A relay without data: messages, and the time that adding takes."""
        engine, strand = self._engine, self._strand
        for step, (leaving, staying) in enumerate(pairwise(chunks)):
            sent, received = self._send(leaving, to), self._recv(staying, origin)
            strand.waits_for = sent, received
            if not sent.left:
                sent.sender = errand
                yield
            if not received.arrived:
                received.receiver = errand
                yield
            if step < adding and engine.gamma and staying.nbytes:
                start_s = engine.now
                strand.waits_for = "reduce"
                engine.wake_after(engine.gamma * staying.nbytes, errand)
                yield
                self._note("reduce", start_s, self.label)

    def wait_any(self, works: Sequence[Work], timeout_s: float | None = None) -> Work | None:
        seconds = 1e9 if timeout_s is None else timeout_s
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"rank {self.rank}: wait_any takes seconds that are 0 or more and "
                              f"finite, not {seconds!r}")
        messages = [work.message for work in works if isinstance(work, Receiving)]
        if not any(message.arrived for message in messages):
            self._strand.waits_for = messages
            self._engine.wait_any(self._strand, messages, seconds)
        return next((work for work in works
                     if isinstance(work, Receiving) and work.message.arrived), None)

    def _send(self, x: Any, channel: Channel) -> Message:
        """Post the sender's side of a message."""
        engine = self._engine
        if engine.stopping:
            raise Stopped
        if isinstance(x, torch.Tensor):
            real = not x.is_meta
            if real:
                self._check_tensor(x, "send")
        else:
            x, real = Envelope(x), True
        message = channel.first
        if channel.shared:  # the receiver also takes from anyone
            message = channel.take_recv()
        elif message is not None:  # something waits: a receive? (`take_recv`, the short way)
            if message.x is None:
                channel.first = message.next
            else:
                message = None
        if message is None:
            message = Message()
            message.into = message.receiver = None
            message.arrived = False
            channel.put_send(message)
        engine.order = message.order = engine.order + 1
        message.channel = channel
        message.x = x
        message.nbytes = x.nbytes
        message.real = self._strand.real = real
        message.label = self.label
        message.sent_s = engine.now
        message.left = False
        message.sender = None
        if message.nbytes <= engine.eager_bytes:
            self._send_eagerly(message)
        if message.into is not None:
            engine.match(message)
        return message

    def _send_eagerly(self, message: Message) -> None:
        """Let a small message go before its receiver is there; its sender is free at once."""
        if isinstance(message.x, torch.Tensor):
            message.x = message.x.detach().clone()
        message.left = True
        message.end_s = 0.0
        self._engine.leave(message)

    def _recv(self, x: Any, source: Channel | Mailbox) -> Message:
        """Post the receiver's side of a message."""
        engine = self._engine
        if engine.stopping:
            raise Stopped
        if not isinstance(x, torch.Tensor):
            x = self._inbox(x)
        elif self._strand.real:
            self._check_tensor(x, "receive into")
        message = source.first
        if source.shared:
            message = source.take_send()
        elif message is not None:  # something waits: a send? (`take_send`, the short way)
            if message.x is not None:
                source.first = message.next
            else:
                message = None
        if message is None:
            message = Message()
            message.x = message.sender = None
            message.left = False
            message.source = source
            engine.order = message.order = engine.order + 1
            source.put(message)
        message.into = x
        message.wanted_label = self.label
        message.wanted_s = engine.now
        message.arrived = False
        message.receiver = None
        if message.x is not None:
            engine.match(message)
        return message

    def _inbox(self, x: Any) -> Inbox:
        if isinstance(x, list):
            return Inbox(x)
        raise ConfigError(f"rank {self.rank}: recv needs a tensor or a list to receive into, "
                          f"not {type(x).__name__}")

    def _check_tensor(self, x: torch.Tensor, verb: str) -> None:
        """Raise `ConfigError` unless `x` is dense and, if it is to be filled, has no element
        twice (as an expanded tensor has)."""
        if x.layout is not torch.strided or x.is_quantized:
            raise ConfigError(f"rank {self.rank}: can't {verb} a {x.layout} tensor; make it dense")
        if verb == "receive into" and not x.is_contiguous() and overlaps_itself(x):
            raise ConfigError(f"rank {self.rank}: can't receive into an expanded tensor, whose "
                              f"elements share memory; receive into a copy (x.contiguous())")

    def _channel_to(self, dst: int) -> Channel:
        self._check_peer(dst, "send to")
        return self._engine.channel(self._context, self._strand.rank, self._ranks[dst], self.rank)

    def _channel_from(self, src: int | None) -> Channel | Mailbox:
        if src is None:
            return self._engine.mailbox(self._context, self._strand.rank).open()
        self._check_peer(src, "receive from")
        return self._engine.channel(self._context, self._ranks[src], self._strand.rank, src)

    @contextmanager
    def compute(self, label: str, seconds: float = 0.0) -> Iterator[None]:
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"rank {self.rank}: compute({label!r}) can't take {seconds} s")
        engine = self._engine
        start_s = engine.now
        yield
        if seconds:
            self._pass_time(seconds, f"compute {label}")
        self._note("compute", start_s, label)

    def _pass_time(self, seconds: float, doing: str) -> None:
        self._strand.waits_for = doing
        self._engine.sleep(self._strand, seconds)

    def _reduced(self, into: torch.Tensor) -> None:
        engine = self._engine
        if engine.gamma and into.nbytes:
            start_s = engine.now
            self._pass_time(engine.gamma * into.nbytes, "reduce")
            self._note("reduce", start_s, self.label)

    def _note(self, kind: str, start_s: float, label: str) -> None:
        """A span of the trace has come to its end."""
        engine = self._engine
        if engine.tracing:
            engine.spans.append((self._strand.rank, kind, start_s, engine.now, label))

    def now(self) -> float:
        return self._engine.now

    @property
    def machine(self) -> Machine:
        """Of the way from the first rank to the last, as if nothing else were on it."""
        topology = self._engine.topology
        if self.size < 2:
            return Machine(0.0, 0.0, self._engine.gamma)
        latency_s, links = topology.route(self._ranks[0], self._ranks[-1])
        slowest_Bps = min((topology.capacity_Bps[link] for link in links), default=math.inf)
        return Machine(latency_s, 1 / max(slowest_Bps, 1e-9), self._engine.gamma)  # 0: failed

    def _agree(self, value: Any) -> list[Any]:
        key = (self._context, self._ranks[0], self._meetings)  # groups of a split share a context
        self._meetings += 1
        meeting = self._engine.meetings.setdefault(key, {})
        meeting[self.rank] = (value, self._strand)
        if len(meeting) == self.size:
            del self._engine.meetings[key]
            for _, (_, strand) in sorted(meeting.items()):  # all go on in order of their ranks
                self._engine.wake(strand)
        self._strand.waits_for = "split"
        self._strand.pause()
        return [meeting[rank][0] for rank in range(self.size)]

    def _form(self, ranks: Sequence[int], context: tuple[Any, ...]) -> SimComm:
        members = [self._ranks[rank] for rank in ranks]
        return SimComm(self._engine, self._strand, members, (*self._context, context))

    def begin(self, fn: Any, *args: Any, **options: Any) -> Work:
        raise NotImplementedError


Peer = TypeVar("Peer", int, int | None)
Found = TypeVar("Found")


class _Made(dict[Peer, Found]):
    """By peer; made when first asked for."""

    def __init__(self, make: Callable[[Peer], Found]):
        super().__init__()
        self._make: Callable[[Peer], Found] = make

    def __missing__(self, peer: Peer) -> Found:
        found = self[peer] = self._make(peer)
        return found


class Crashed(BaseException):
    """Ends a rank that was to crash; the others go on. Never seen outside."""


class MortalComm(SimComm):
    """Crashes before its next event once it has had `limit` of them: an event is a call of `post`,
    a wait with a limit, or a `compute`, here or in a part of it. What it has posted by then still
    goes its way."""

    def __init__(self, *where: Any, limit: float, events: Iterator[int] | None = None):
        super().__init__(*where)
        self._limit, self._events = limit, events or itertools.count()  # shared by all its parts

    def _form(self, ranks: Sequence[int], context: tuple[Any, ...]) -> SimComm:
        part = super()._form(ranks, context)
        return MortalComm(part._engine, part._strand, part._ranks, part._context,
                          limit=self._limit, events=self._events)

    def _count(self) -> None:
        if next(self._events) >= self._limit:
            raise Crashed

    def post(self, *ops: Send | Recv) -> list[Sending | Receiving]:  # type: ignore[override]
        self._count()
        return super().post(*ops)

    def wait_any(self, works: Sequence[Work], timeout_s: float | None = None) -> Work | None:
        self._count()
        return super().wait_any(works, timeout_s)

    @contextmanager
    def compute(self, label: str, seconds: float = 0.0) -> Iterator[None]:
        self._count()
        with super().compute(label, seconds):
            yield

    exchange = Comm.exchange
    sendrecv = Comm.sendrecv
    relay = one_by_one
