"""A communicator whose messages cross a simulated network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cloudpickle
import torch

from dtlab.comm import Comm, Recv, Send, Work
from dtlab.errors import ConfigError
from dtlab.simulator.engine import Engine
from dtlab.simulator.messages import Channel, Incoming, Outgoing
from dtlab.simulator.strands import Stopped, Strand


class SimComm(Comm):
    """`ranks[i]` is, in the numbering of the whole run, the i-th member of this communicator."""

    def __init__(self, engine: Engine, strand: Strand, ranks: Sequence[int], context: int = 0,
                 contexts: list[int] | None = None):
        self._engine, self._strand = engine, strand
        self._ranks, self._context = ranks, context
        self._contexts = contexts if contexts is not None else [1]  # the next free one, shared
        self.rank, self.size = ranks.index(strand.rank), len(ranks)
        self.device = torch.device("cpu")
        self._to: dict[int, Channel] = {}
        self._from: dict[int, Channel] = {}
        self._meetings = 0

    def post(self, *ops: Send | Recv) -> list[Work]:
        engine = self._engine
        if engine.stopping:
            raise Stopped
        works: list[Work] = []
        for op in ops:
            works.append(self._send(*op) if op.__class__ is Send else self._recv(*op))
        return works

    def sendrecv(self, out: Any, dst: int, into: Any, src: int | None) -> None:
        # What Comm.sendrecv does, without its intermediate records: rings live in this call.
        if self._engine.stopping:
            raise Stopped
        sent, received = self._send(out, dst), self._recv(into, src)
        if not sent.done:
            sent.wait()
        if not received.done:
            received.wait()

    def _send(self, x: Any, dst: int) -> Outgoing:
        channel = self._to.get(dst) or self._channel_to(dst)
        if isinstance(x, torch.Tensor):
            nbytes = x.nbytes
            self._strand.real = not x.is_meta
        else:
            x = cloudpickle.dumps(x)
            nbytes = len(x)
        engine = self._engine
        side = Outgoing(x, nbytes, dst, self.label, engine.now, self._strand, channel)
        engine.send(side)
        return side

    def _recv(self, x: Any, src: int | None) -> Incoming:
        if isinstance(x, torch.Tensor):
            nbytes = x.nbytes
        elif isinstance(x, list):
            nbytes = -1  # an object: its sender knows how large
        else:
            raise ConfigError(f"rank {self.rank}: recv needs a tensor or a list to receive into, "
                              f"not {type(x).__name__}")
        engine = self._engine
        side = Incoming(x, nbytes, src, self.label, engine.now, self._strand)
        if src is None:
            engine.recv_from_anyone(side, engine.mailbox(self._context, self._strand.rank))
        else:
            engine.recv(side, self._from.get(src) or self._channel_from(src))
        return side

    def _channel_to(self, dst: int) -> Channel:
        self._check_peer(dst, "send to")
        channel = self._engine.channel(self._context, self._strand.rank, self._ranks[dst],
                                       self.rank)
        return self._to.setdefault(dst, channel)

    def _channel_from(self, src: int) -> Channel:
        self._check_peer(src, "receive from")
        channel = self._engine.channel(self._context, self._ranks[src], self._strand.rank, src)
        return self._from.setdefault(src, channel)

    @contextmanager
    def compute(self, label: str, seconds: float = 0.0) -> Iterator[None]:
        if not seconds >= 0:
            raise ConfigError(f"rank {self.rank}: compute({label!r}) can't take {seconds} s")
        engine = self._engine
        start_s = engine.now
        yield
        if seconds:
            self._pass_time(seconds, f"compute {label}")
        if engine.tracing:
            engine.spans.append((self._strand.rank, "compute", start_s, engine.now, label))

    def _pass_time(self, seconds: float, doing: str) -> None:
        self._strand.doing = doing
        self._engine.sleep(self._strand, seconds)

    def _reduced(self, nbytes: int) -> None:
        engine = self._engine
        if engine.gamma and nbytes:
            start_s = engine.now
            self._pass_time(engine.gamma * nbytes, "reduce")
            if engine.tracing:
                engine.spans.append(
                    (self._strand.rank, "reduce", start_s, engine.now, self.label)
                )

    def now(self) -> float:
        return self._engine.now

    def _agree(self, value: Any) -> list[Any]:
        key = (self._context, self._ranks[0], self._meetings)  # groups of a split share a context
        self._meetings += 1
        meeting = self._engine.meetings.setdefault(key, {})
        meeting[self.rank] = (value, self._strand)
        if len(meeting) < self.size:
            self._strand.doing = "split"
            self._strand.pause()
        else:
            for rank, (_, strand) in sorted(meeting.items()):
                if rank != self.rank:
                    self._engine.wake(strand)
        return [meeting[rank][0] for rank in range(self.size)]

    def _subgroup(self, ranks: Sequence[int], context: int) -> SimComm:
        self._contexts[0] = context + 1
        members = [self._ranks[rank] for rank in ranks]
        return SimComm(self._engine, self._strand, members, context, self._contexts)

    def _next_context(self) -> int:
        return self._contexts[0]
