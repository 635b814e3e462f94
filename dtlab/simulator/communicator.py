"""A communicator whose messages cross a simulated network."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dtlab.checks import check_amount, check_wait, no_operation
from dtlab.comm import Comm, Recv, Send, Work
from dtlab.errors import ConfigError, RankDied
from dtlab.machine import Machine
from dtlab.ranks.matching import check_match, check_sources, describe
from dtlab.ranks.overlap import check_overlap, extent_of
from dtlab.reduction import check_receives, not_dense
from dtlab.simulator.deaths import connection_broken
from dtlab.simulator.engine import Engine
from dtlab.simulator.lines import learner_line
from dtlab.simulator.messages import (
    Channel,
    ObjectBuffer,
    ObjectPayload,
    PendingMessage,
    ReceiveQueue,
    generation,
)
from dtlab.simulator.streams import SimStream
from dtlab.simulator.waiting import Agreement
from dtlab.simulator.works import MessageWork, Receiving, Sending, SimWork


class SimComm(Comm):
    """me: this rank of the run. ranks: of the run, the members in the communicator's order."""

    def __init__(self, engine: Engine, me: int, ranks: Sequence[int],
                 context: tuple[Any, ...] = ()):
        super().__init__(ranks.index(me), len(ranks), torch.device("cpu"))
        self._engine, self._me = engine, me
        self._ranks, self._context = ranks, context
        self._to = cache(self._channel_to)
        self._from = cache(self._channel_from)
        self._agreements = itertools.count()
        self._streams: list[SimStream] = []  # the stream, once something has begun

    def post(self, *ops: Send | Recv) -> list[Work]:
        line, engine, me = learner_line(sys._getframe(1)), self._engine, self._me
        posted = engine.running.posted
        check_overlap(self, ops, posted.values())
        works: list[Work] = []
        for op in ops:
            if op.__class__ is Send:
                works.append(Sending(engine, me, line, self._send(op[0], op[1]), op[1]))
            elif op.__class__ is Recv:
                message = self._recv(op[0], op[1])
                works.append(Receiving(engine, me, line, message,
                                       describe(op[0], self.label) if op[1] is None else None))
            else:
                raise no_operation(self.rank, op)
            if not self.in_collective and (extent := extent_of(op[0], op.__class__ is Recv)):
                posted[works[-1]] = extent
        return works

    # The next four do as in Comm without making a `Work`, which takes half as long.

    def send(self, x: Any, dst: int) -> None:
        check_overlap(self, [Send(x, dst)], self._engine.running.posted.values())
        self._wait((self._send(x, dst),), ())

    def recv(self, x: Any, src: int | None = None) -> int:
        check_overlap(self, [Recv(x, src)], self._engine.running.posted.values())
        message = self._recv(x, src)
        self._wait((), (message,))
        peer: int = message.channel.peer
        return peer

    def sendrecv(self, out: Any, dst: int, into: Any, src: int | None) -> None:
        posted = self._engine.running.posted
        if posted or not self.in_collective:
            check_overlap(self, (Send(out, dst), Recv(into, src)), posted.values())
        self._wait((self._send(out, dst),), (self._recv(into, src),))

    def exchange(self, *ops: Send | Recv) -> None:
        for op in ops:
            if op.__class__ not in (Send, Recv):
                raise no_operation(self.rank, op)
        check_overlap(self, ops, self._engine.running.posted.values())
        receives = [op for op in ops if op.__class__ is Recv]
        check_sources(self.rank, any(op[1] is not None for op in receives),
                      [describe(op[0], self.label) for op in receives if op[1] is None])
        messages = [self._send(op[0], op[1]) if op.__class__ is Send else self._recv(op[0], op[1])
                    for op in ops]
        self._wait([m for op, m in zip(ops, messages, strict=True) if op.__class__ is Send],
                   [m for op, m in zip(ops, messages, strict=True) if op.__class__ is not Send])

    def _wait(self, sends: Sequence[PendingMessage], receives: Sequence[PendingMessage]) -> None:
        """Wait for the end of all these sends and receives."""
        engine = self._engine
        engine.running.waits_for = *sends, *receives
        for message in sends:
            if not message.send_done:
                engine.wait_for(message, self.label)
        for message in receives:
            if not message.recv_done:
                engine.wait_for(message, self.label)

    def wait_any(self, works: Sequence[Work], timeout_s: float | None = None) -> Work | None:
        check_wait(self.rank, works, SimWork, timeout_s)
        ours: list[SimWork] = list(works)  # type: ignore[arg-type]
        done = next((work for work in ours if work.is_done()), None)
        if done is None:
            strand = self._engine.running
            strand.waits_for = [work.message for work in ours if isinstance(work, MessageWork)] or (
                "wait_any")
            self._engine.wait_for_any([work.wake_when_done(strand) for work in ours], self.label,
                                      timeout_s)
            done = next((work for work in ours if work.is_done()), None)
        if done is not None and done.error is None and not getattr(done, "is_broken", False):
            done.wait()
        return done

    def begin(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Work:
        if not self._streams:
            comm = self._new_group(range(self.size), ("stream",))
            self._streams.append(SimStream(self._engine, comm, self._has_ended))
        line = learner_line(sys._getframe(1))
        return self._streams[0].begin(line, self.label, fn, args, options)

    def _send(self, x: Any, dst: int) -> PendingMessage:
        """Post the sender's side of a message."""
        try:
            channel = self._to(dst)
        except TypeError:  # unhashable, so no rank
            self._check_peer(dst, "send to")
            raise
        engine = self._engine
        strand = engine.running
        if isinstance(x, Tensor):
            real = not x.is_meta
            if real:
                self._check_tensor(x, "send")
        else:
            x, real = ObjectPayload(x), True
        message = channel.take_recv()
        if message is None:
            message = PendingMessage()
            message.into = None
            message.recv_done = False
            message.label = self.label
            channel.put_send(message)
        engine.order = message.order = engine.order + 1
        message.channel = channel
        message.links = channel.links
        message.x = x
        message.nbytes = message.remaining = nbytes = x.nbytes
        message.real = strand.real = real
        message.sent_s = engine.now
        message.send_done = False
        message.sender = strand
        if nbytes <= engine.eager_bytes and not channel.closed:
            self._send_eagerly(message)
        if message.into is not None:
            engine.match(message, self.label, message.label)
        return message

    def _send_eagerly(self, message: PendingMessage) -> None:
        """Start a small message before its receive is posted; the sender does not wait."""
        if isinstance(message.x, Tensor):
            message.x = message.x.detach().clone()
        message.send_done = True
        message.end_s = 0.0
        self._engine.matched.append(message)

    def _recv(self, x: Any, src: int | None) -> PendingMessage:
        """Post the receiver's side of a message."""
        try:
            source = self._from(src)
        except TypeError:
            self._check_peer(src, "receive from")
            raise
        engine = self._engine
        strand = engine.running
        if not isinstance(x, Tensor):
            x = self._buffer(x)
        elif strand.real:
            self._check_tensor(x, "receive into")
        queue = source.from_anyone
        if queue.anyone or src is None:
            check_sources(self.rank, src is not None or queue.named > 0,
                          [*queue.anyone, *[describe(x, self.label)] * (src is None)])
        message = source.take_send()
        if message is None:
            message = PendingMessage()
            message.x = None
            message.channel = source
            message.label = self.label
            engine.order = message.order = engine.order + 1
            source.put(message)
        message.into = x
        message.wanted_s = engine.now
        message.recv_done = False
        message.receiver = strand
        if message.x is not None:
            engine.match(message, message.label, self.label)
        return message

    def _buffer(self, x: Any) -> ObjectBuffer:
        if isinstance(x, list):
            return ObjectBuffer(x)
        raise ConfigError(f"rank {self.rank}: recv needs a tensor or a list to receive into, "
                          f"not {type(x).__name__}")

    def _check_tensor(self, x: torch.Tensor, verb: str) -> None:
        """Raise `ConfigError` unless `x` is dense and, if it is to be filled, has no element
        twice (as an expanded tensor has)."""
        if kind := not_dense(x):
            raise ConfigError(f"rank {self.rank}: can't {verb} {kind}; make it dense")
        if verb == "receive into":
            check_receives(self.rank, x)

    def _channel_to(self, dst: int) -> Channel:
        self._check_peer(dst, "send to")
        return self._engine.channels.get(self._context, self._me, self._ranks[dst], self.rank)

    def _channel_from(self, src: int | None) -> Channel | ReceiveQueue:
        if src is None:
            queue = self._engine.channels.receive_queue(self._context, self._me).open(self._ranks)
            if self._engine.deaths.disconnected(self._context, self._ranks) is not None:
                queue.close()
            return queue
        self._check_peer(src, "receive from")
        return self._engine.channels.get(self._context, self._ranks[src], self._me, src)

    @contextmanager
    def compute(self, label: str, seconds: float = 0.0) -> Iterator[None]:
        check_amount(f"rank {self.rank}: seconds of compute({label!r})", seconds)
        engine = self._engine
        start_s = engine.now
        yield
        if seconds:
            self._pass_time(seconds, f"compute {label}")
        self._note("compute", start_s, label)

    def _pass_time(self, seconds: float, doing: str) -> None:
        self._engine.running.waits_for = doing
        self._engine.sleep(seconds)

    def _reduced(self, into: torch.Tensor) -> None:
        engine = self._engine
        if engine.gamma and into.nbytes:
            start_s = engine.now
            self._pass_time(engine.gamma * into.nbytes, "reduce")
            self._note("reduce", start_s, self.label)

    def _note(self, kind: str, start_s: float, label: str) -> None:
        """Record a span that ends now."""
        engine = self._engine
        if engine.tracing:
            engine.spans.append((self._me, kind, start_s, engine.now, label,
                                 engine.running.stream))

    def now(self) -> float:
        return self._engine.now

    @property
    def machine(self) -> Machine:
        """The costs of the route from the first rank to the last, without other traffic."""
        topology = self._engine.topology
        if self.size < 2:
            return Machine(0.0, 0.0, self._engine.gamma)
        latency_s, links = topology.route(self._ranks[0], self._ranks[-1])
        slowest_Bps = min((topology.capacity_Bps[link] for link in links), default=math.inf)
        return Machine(latency_s, 1 / max(slowest_Bps, 1e-9), self._engine.gamma)  # 0: failed

    def _all_gather_objects(self, value: Any) -> list[Any]:
        engine, strand = self._engine, self._engine.running
        self._check_open()
        key = self._context, next(self._agreements)
        agreement = engine.agreements.setdefault(key, {})
        mine = describe([], self.label or "split")
        for rank, (_, _, theirs) in itertools.islice(agreement.items(), 1):  # as all others
            check_match(mine, self._me, theirs, self._ranks[rank])
        agreement[self.rank] = (value, strand, mine)
        if len(agreement) == self.size:
            del engine.agreements[key]
            for rank in range(self.size):  # in order of ranks
                engine.wake(agreement[rank][1])
        call = strand.waits_for = Agreement(mine.label)
        call.ranks, call.made = self._ranks, agreement
        engine.wait_for(agreement, self.label)
        while len(agreement) < self.size:
            self._check_open()
            engine.wait_for(agreement, self.label)
        return [agreement[rank][0] for rank in range(self.size)]

    def _check_open(self) -> None:
        """Raise `RankDied` if one of my ranks has died, or has called `shrink`."""
        if self._has_ended():
            raise RankDied.after_shrink(self._me)
        closed = self._engine.deaths.disconnected(self._context, self._ranks)
        if closed is not None:
            raise connection_broken(self._me, closed)

    def _has_ended(self) -> bool:
        """Has this rank called `shrink`?"""
        closed: int | None = self._engine.deaths.disconnected(self._context, [self._me])
        return closed is not None

    def shrink(self) -> SimComm:
        if self._context not in ((), (generation(self._context),)):
            super().shrink()
        return self.of_survivors(*self._engine.deaths.shrink(self._me))

    def of_survivors(self, number: int, ranks: list[int]) -> SimComm:
        """The communicator of the number-th generation."""
        return SimComm(self._engine, self._me, ranks, (number,))

    def joining(self) -> bool:
        return bool(self._engine.deaths.joining())

    @property
    def global_ranks(self) -> tuple[int, ...]:
        return tuple(self._ranks)

    def _make_group(self, ranks: Sequence[int], context: tuple[Any, ...]) -> SimComm:
        members = [self._ranks[rank] for rank in ranks]
        return SimComm(self._engine, self._me, members, (*self._context, context))
