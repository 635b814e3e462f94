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
from collections import OrderedDict, deque
from typing import Any

import torch

from dtlab.comm import Work
from dtlab.errors import Deadlock, RunTimeout, Waiting
from dtlab.matching import check_match, describe
from dtlab.simulator.network import Flow, Network
from dtlab.simulator.strands import Strand
from dtlab.topology import Topology
from dtlab.trace import Rows
from dtlab.tracebacks import learner_line


class Side(Work):
    """One end of a message: what a rank posted, and whether it is done."""

    __slots__ = ("done", "label", "nbytes", "order", "peer", "posted_s", "strand", "verb",
                 "waited", "x")

    def __init__(self, verb: str, x: Any, nbytes: int, peer: int | None, label: str,
                 posted_s: float, strand: Strand):
        self.verb = verb  # "send" | "recv"
        self.x = x  # a tensor; for an object: its pickle (send), or the list to append to (recv)
        self.nbytes = nbytes
        self.peer = peer  # in the numbering of the communicator it was posted on; None: anyone
        self.label = label
        self.posted_s = posted_s
        self.strand = strand
        self.done = False
        self.waited = False  # its strand is paused until it is done

    def wait(self) -> int:
        if not self.done:
            strand = self.strand
            self.waited = True
            strand.doing = self
            strand.pause()
        return self.peer  # type: ignore[return-value]  # the match has filled it in


class Message(Flow):
    """A send and its receive. `recv` is None while an eager message has no receiver yet."""

    __slots__ = ("channel", "moving", "recv", "send", "start_s")

    def __init__(self, send: Side, recv: Side | None, channel: Channel, start_s: float):
        self.links = channel.links
        self.remaining = send.nbytes
        self.rate_Bps = 0.0
        self.end_s = -1.0
        self.send = send
        self.recv = recv
        self.channel = channel
        self.start_s = start_s
        self.moving = False

    @property
    def arrived(self) -> bool:
        """All of its bytes are at the receiver's."""
        return self.moving and self.end_s < 0


class Mailbox:
    """Where one rank of one communicator receives: from one other, or from anyone."""

    __slots__ = ("channels", "from_anyone", "sends")

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        self.from_anyone: deque[Side] = deque()
        # Sends that nobody has received yet, oldest first. Kept from the first receive from
        # anyone on: most ranks never make one.
        self.sends: OrderedDict[Side, Channel] | None = None

    def oldest_sends(self) -> OrderedDict[Side, Channel]:
        """`sends`, set up when first asked for."""
        if self.sends is None:
            pending = [(side.order, side, c) for c in self.channels for side in c.sends]
            pending.sort(key=lambda row: row[0])
            self.sends = OrderedDict((side, channel) for _, side, channel in pending)
        return self.sends


class Channel:
    """What is posted from one rank to another on one communicator, and not yet matched."""

    __slots__ = ("dst", "latency_s", "links", "mailbox", "peer", "recvs", "sends", "src")

    def __init__(self, src: int, dst: int, peer: int, mailbox: Mailbox, topology: Topology):
        self.src, self.dst = src, dst  # in the numbering of the whole run
        self.peer = peer  # the sender, in the numbering of the communicator
        self.latency_s, self.links = topology.route(src, dst)
        self.mailbox = mailbox
        mailbox.channels.append(self)
        self.sends: deque[Side] = deque()
        self.recvs: deque[Side] = deque()


class Engine:
    """Runs strands over a network in virtual time; see the module's text."""

    def __init__(self, topology: Topology, *, gamma: float, eager_bytes: float, trace: bool):
        self.topology = topology
        self.gamma = gamma
        self.eager_bytes = eager_bytes
        self.now = 0.0
        self.running: Strand | None = None
        self.stopping = False
        self.tracing = trace
        self.messages = Rows(8)  # the fields of trace.Message
        self._record = self.messages.extend
        self.spans: list[tuple[Any, ...]] = []  # rows of trace.Span
        self.meetings: dict[Any, dict[int, Any]] = {}  # see SimComm._agree
        self.channels: dict[tuple[int, int, int], Channel] = {}
        self.mailboxes: dict[tuple[int, int], Mailbox] = {}
        self._network = Network(topology)
        self._ready: deque[Strand] = deque()
        self._times: list[float] = []  # a heap of the instants at which something is due
        self._due: dict[float, list[Message | Strand]] = {}  # what is due then, oldest first
        self._order = 0
        self._eager: dict[Side, Message] = {}  # sends that moved before their receiver came

    # ---- the loop ------------------------------------------------------------------------------

    def run(self, strands: list[Strand], timeout: float | None) -> None:
        """Run all strands to their ends. Raises `Deadlock`, `RunTimeout`, or what a strand raised
        through `fail`. Rows of the trace are in `messages` and `spans` afterwards."""
        limit = None if timeout is None else time.monotonic() + timeout
        collecting = gc.isenabled()
        gc.disable()  # millions of small records, no cycles: searching for them doubles the time
        try:
            self._ready.extend(strands)
            self._loop(strands, limit)
        finally:
            self.stopping = True
            for strand in strands:
                if not strand.done:
                    strand.stop()
            if collecting:
                gc.enable()

    def _loop(self, strands: list[Strand], limit: float | None) -> None:
        ready, times, due, network = self._ready, self._times, self._due, self._network
        generator = torch.default_generator  # every rank has random numbers of its own
        while True:
            while ready:
                self.running = strand = ready.popleft()
                if strand.real:
                    generator.set_state(strand.random_state)
                strand.resume()
                if strand.real:
                    strand.random_state = generator.get_state()
                if self.stopping:
                    return
            for message in network.settle(self.now):
                if message.end_s in due:
                    due[message.end_s].append(message)  # type: ignore[arg-type]
                else:
                    self._at(message.end_s, message)  # type: ignore[arg-type]
            if limit is not None and time.monotonic() > limit:
                raise RunTimeout("the simulation did not end within its limit of real time",
                                 self.waiting(strands))
            if not times:
                break
            self.now = heapq.heappop(times)
            for what in due.pop(self.now):
                if what.__class__ is Message:
                    self._advance(what)
                else:
                    ready.append(what)
        if not all(strand.done for strand in strands):
            raise Deadlock("deadlock: every rank that is left waits for another",
                           self.waiting(strands))

    def _at(self, when_s: float, what: Message | Strand) -> None:
        """At virtual time `when_s`, advance the message or let the strand go on."""
        bucket = self._due.get(when_s)
        if bucket is None:
            self._due[when_s] = [what]
            heapq.heappush(self._times, when_s)
        else:
            bucket.append(what)

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
        if key not in self.channels:
            self.channels[key] = Channel(src, dst, peer, self.mailbox(context, dst), self.topology)
        return self.channels[key]

    def mailbox(self, context: int, dst: int) -> Mailbox:
        """Where `dst` receives from anyone."""
        return self.mailboxes.setdefault((context, dst), Mailbox())

    def send(self, channel: Channel, side: Side) -> None:
        """Post a send: match the receive that has waited longest for it, or wait."""
        mailbox, recvs = channel.mailbox, channel.recvs
        anyone = mailbox.from_anyone
        if anyone and (not recvs or anyone[0].order < recvs[0].order):
            self._match(side, anyone.popleft(), channel)
        elif recvs:
            self._match(side, recvs.popleft(), channel)
        else:
            self._order += 1
            side.order = self._order
            channel.sends.append(side)
            if mailbox.sends is not None:
                mailbox.sends[side] = channel
            if self.eager_bytes and side.nbytes <= self.eager_bytes:
                self._send_eagerly(side, channel)

    def recv(self, channel: Channel, side: Side) -> None:
        """Post a receive from one rank."""
        if channel.sends:
            send = channel.sends.popleft()
            if channel.mailbox.sends is not None:
                del channel.mailbox.sends[send]
            self._match(send, side, channel)
        else:
            self._order += 1
            side.order = self._order
            channel.recvs.append(side)

    def recv_from_anyone(self, mailbox: Mailbox, side: Side) -> None:
        """Post a receive from anyone: the oldest send wins."""
        sends = mailbox.oldest_sends()
        if sends:
            send, channel = sends.popitem(last=False)
            channel.sends.popleft()
            self._match(send, side, channel)
        else:
            self._order += 1
            side.order = self._order
            mailbox.from_anyone.append(side)

    def _match(self, send: Side, recv: Side, channel: Channel) -> None:
        a, b = send.x, recv.x
        if not (
            send.nbytes == recv.nbytes
            and a.dtype == b.dtype
            and (a.ndim == b.ndim == 1 or a.shape == b.shape)
            and send.label == recv.label
        ):  # objects, and everything that doesn't fit
            check_match(describe(a, send.label), channel.src, describe(b, recv.label), channel.dst)
        recv.peer = channel.peer
        if self._eager and send in self._eager:
            message = self._eager.pop(send)
            message.recv = recv
            if message.arrived:
                self._deliver(message, recv)
        else:
            message = Message(send, recv, channel, self.now)
            self._at(self.now + channel.latency_s, message)

    def _send_eagerly(self, send: Side, channel: Channel) -> None:
        """Move a small message before its receiver is there: the sender is free at once."""
        if isinstance(send.x, torch.Tensor):
            send.x = send.x.detach().clone()
        send.done = True
        message = self._eager[send] = Message(send, None, channel, self.now)
        self._at(self.now + channel.latency_s, message)

    def _advance(self, message: Message) -> None:
        """Its latency has passed: it begins to flow. Or its last byte has come: deliver it."""
        if not message.moving:
            message.moving = True
            self._network.start(message, self.now)
        elif message.end_s == self.now:  # else its rate has changed since this was planned
            message.end_s = -1.0
            self._network.end(message)
            if message.recv is not None:
                self._deliver(message, message.recv)

    def _deliver(self, message: Message, recv: Side) -> None:
        """Put the data in place and let both sides go on."""
        send, channel = message.send, message.channel
        if recv.x.__class__ is list:
            recv.x.append(pickle.loads(send.x))
        elif not send.x.is_meta and not recv.x.is_meta:
            recv.x.detach().copy_(send.x.detach())
        if self.tracing:
            self._record((channel.src, channel.dst, send.nbytes, send.posted_s,
                          recv.posted_s, message.start_s, self.now, send.label))
        send.done = recv.done = True
        if send.waited:
            self._ready.append(send.strand)
        if recv.waited:
            self._ready.append(recv.strand)
