"""The engine: one clock, one list of what happens next, and the rule that time moves only when
every rank waits.

A message lives through: *posted* by one side, *matched* when the other side posts too, *moving*
once its latency has passed, *arrived*. Ties are broken by order of posting, so that equal inputs
give equal traces, bit for bit.
"""

from __future__ import annotations

import gc
import heapq
import pickle
import time
from collections import deque
from typing import Any

import torch

from dtlab.errors import Deadlock, RunTimeout, Waiting
from dtlab.matching import check_match, describe
from dtlab.simulator.messages import Channel, Incoming, Mailbox, Outgoing, Side
from dtlab.simulator.network import Network
from dtlab.simulator.strands import Strand
from dtlab.topology import Topology
from dtlab.trace import Rows
from dtlab.tracebacks import learner_line


class Engine:
    """Runs strands over a network in virtual time; see the module's text."""

    def __init__(self, topology: Topology, *, gamma: float, eager_bytes: float, trace: bool):
        self.topology = topology
        self.gamma = gamma
        self.eager_bytes = eager_bytes
        self.now = 0.0
        self.stopping = False
        self.tracing = trace
        self.messages = Rows(8)  # the fields of trace.Message
        self.spans: list[tuple[Any, ...]] = []  # the fields of trace.Span
        self.meetings: dict[Any, dict[int, Any]] = {}  # see SimComm._agree
        self._record = self.messages.extend
        self._channels: dict[tuple[int, int, int], Channel] = {}
        self._mailboxes: dict[tuple[int, int], Mailbox] = {}
        self._network = Network(topology)
        self._ready: deque[Strand] = deque()
        self._times: list[float] = []  # a heap of the instants at which something is due
        self._due: dict[float, list[Outgoing | Strand]] = {}  # what is due then, oldest first
        self._order = 0
        self._begun = False
        self._limit_s: float | None = None  # of real time
        self._broken: BaseException | None = None  # why `next_strand` gave up

    # ---- the clock -----------------------------------------------------------------------------

    def run(self, strands: list[Strand], timeout: float | None) -> None:
        """Run all strands to their ends. Raises `Deadlock` or `RunTimeout`. The rows of the trace
        are in `messages` and `spans` afterwards."""
        self._limit_s = None if timeout is None else time.monotonic() + timeout
        collecting = gc.isenabled()
        gc.disable()  # millions of short-lived records, no cycles: searching for them costs much
        try:
            for strand in strands:  # the first steps of each; nobody hands over meanwhile
                strand.resume()
                if self.stopping:
                    return
            self._begun = True
            while following := self.next_strand():
                following.resume()
                if self.stopping:
                    return
            if isinstance(self._broken, RunTimeout):
                raise RunTimeout(str(self._broken), self.waiting(strands))
            if self._broken is not None:
                raise self._broken
            if not all(strand.done for strand in strands):
                raise Deadlock("deadlock: every rank that is left waits for another",
                               self.waiting(strands))
        finally:
            self.stopping = True
            for strand in strands:
                if not strand.done:
                    strand.stop()
            if collecting:
                gc.enable()

    def next_strand(self) -> Strand | None:
        """The strand to go on next, once the clock has moved as far as it takes. None: there is
        none, for all are done, or for a reason that `run` will raise.

        Called by whoever pauses, so that control passes from strand to strand directly.
        """
        if not self._begun:
            return None
        try:
            ready = self._ready
            while not ready:
                self._settle()
                if not self._times:
                    return None
                self.now = heapq.heappop(self._times)
                for what in self._due.pop(self.now):
                    if what.__class__ is Outgoing:
                        self._advance(what)
                    else:
                        ready.append(what)  # type: ignore[arg-type]
            return None if self.stopping else ready.popleft()
        except BaseException as error:  # must not surface in the rank that happened to pause
            self._broken = error
            return None

    def _settle(self) -> None:
        """Plan the ends of the flows whose rates change at this instant."""
        if self._limit_s is not None and time.monotonic() > self._limit_s:
            raise RunTimeout("the simulation did not end within its limit of real time")
        due = self._due
        for flow in self._network.settle(self.now):
            if flow.end_s in due:
                due[flow.end_s].append(flow)  # type: ignore[arg-type]
            else:
                self._at(flow.end_s, flow)  # type: ignore[arg-type]

    def _at(self, when_s: float, what: Outgoing | Strand) -> None:
        """At virtual time `when_s`, advance the message or let the strand go on."""
        if when_s in self._due:
            self._due[when_s].append(what)
        else:
            self._due[when_s] = [what]
            heapq.heappush(self._times, when_s)

    def wake(self, strand: Strand) -> None:
        """Let a paused strand go on at this instant."""
        self._ready.append(strand)

    def sleep(self, strand: Strand, seconds: float) -> None:
        """Called on `strand`: pause it for virtual `seconds`."""
        self._at(self.now + seconds, strand)
        strand.pause()

    def waiting(self, strands: list[Strand]) -> list[Waiting]:
        """What each rank is doing, as a table for people."""
        rows = []
        for strand in strands:
            what = strand.doing
            line = learner_line(strand.frame()) if not strand.done else ""
            if strand.done:
                rows.append(Waiting(strand.rank, "returned"))
            elif isinstance(what, Side):
                peer = "anyone" if what.peer is None else str(what.peer)
                nbytes = None if what.nbytes < 0 else what.nbytes
                rows.append(Waiting(strand.rank, what.verb, peer, nbytes, line))
            else:
                rows.append(Waiting(strand.rank, str(what or "compute"), line=line))
        return rows

    # ---- messages ------------------------------------------------------------------------------

    def channel(self, context: int, src: int, dst: int, peer: int) -> Channel:
        """The channel from `src` to `dst` (ranks of the run) in one communicator's context."""
        key = (context, src, dst)
        if key not in self._channels:
            mailbox = self.mailbox(context, dst)
            self._channels[key] = Channel(src, dst, peer, mailbox, self.topology)
        return self._channels[key]

    def mailbox(self, context: int, dst: int) -> Mailbox:
        """Where `dst` receives the messages of one communicator's context."""
        return self._mailboxes.setdefault((context, dst), Mailbox())

    def send(self, send: Outgoing) -> None:
        """Post a send: match the receive that has waited longest for it, or wait."""
        channel = send.channel
        recvs, anyone = channel.recvs, channel.mailbox.from_anyone
        if anyone and (not recvs or anyone[0].order < recvs[0].order):
            self._match(send, anyone.popleft())
        elif recvs:
            self._match(send, recvs.popleft())
        else:
            send.order = self._order = self._order + 1
            channel.sends.append(send)
            if channel.mailbox.sends is not None:
                channel.mailbox.sends[send] = None
            if self.eager_bytes and send.nbytes <= self.eager_bytes:
                self._send_eagerly(send)

    def recv(self, recv: Incoming, channel: Channel) -> None:
        """Post a receive from one rank."""
        if channel.sends:
            send = channel.sends.popleft()
            if channel.mailbox.sends is not None:
                del channel.mailbox.sends[send]
            self._match(send, recv)
        else:
            recv.order = self._order = self._order + 1
            channel.recvs.append(recv)

    def recv_from_anyone(self, recv: Incoming, mailbox: Mailbox) -> None:
        """Post a receive from anyone: the oldest send wins."""
        sends = mailbox.oldest_sends()
        if sends:
            send, _ = sends.popitem(last=False)
            send.channel.sends.popleft()
            self._match(send, recv)
        else:
            recv.order = self._order = self._order + 1
            mailbox.from_anyone.append(recv)

    def _match(self, send: Outgoing, recv: Incoming) -> None:
        a, b, channel = send.x, recv.x, send.channel
        if not (
            send.nbytes == recv.nbytes
            and a.dtype == b.dtype
            and (a.ndim == b.ndim == 1 or a.shape == b.shape)
            and send.label == recv.label
        ):  # an object, or something that doesn't fit
            check_match(describe(a, send.label), channel.src, describe(b, recv.label), channel.dst)
        recv.peer = channel.peer
        send.recv = recv
        if not send.done:
            send.matched_s = self.now
            self._at(self.now + channel.latency_s, send)
        elif send.arrived:
            self._deliver(send, recv)

    def _send_eagerly(self, send: Outgoing) -> None:
        """Move a small message before its receiver is there: the sender is free at once."""
        if isinstance(send.x, torch.Tensor):
            send.x = send.x.detach().clone()
        send.done = True
        send.matched_s = self.now
        self._at(self.now + send.channel.latency_s, send)

    def _advance(self, send: Outgoing) -> None:
        """Its latency has passed: it begins to flow. Or its last byte has come: deliver it."""
        if not send.moving:
            send.moving = True
            self._network.start(send, self.now)
        elif send.end_s == self.now:  # else its rate has changed since this was planned
            send.end_s = -1.0
            self._network.end(send)
            if send.recv is not None:
                self._deliver(send, send.recv)

    def _deliver(self, send: Outgoing, recv: Incoming) -> None:
        """Put the data in place and let both sides go on."""
        if recv.nbytes < 0:
            recv.x.append(pickle.loads(send.x))
        elif not send.x.is_meta and not recv.x.is_meta:
            recv.x.detach().copy_(send.x.detach())
        if self.tracing:
            channel = send.channel
            self._record((channel.src, channel.dst, send.nbytes, send.posted_s,
                          recv.posted_s, send.matched_s, self.now, send.label))
        send.done = recv.done = True
        if send.waited:
            self._ready.append(send.strand)
        if recv.waited:
            self._ready.append(recv.strand)
