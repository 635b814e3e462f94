"""The engine: one clock, one agenda of what happens next, and the rule that time moves only when
every rank waits.

A message lives through: *posted* by one side; *matched* when the other side posts too; *started*
as soon as its sender's port is free; *moving* once its latency has passed; *arrived*. Ties are
broken by order of posting, so that equal inputs give equal traces, bit for bit.

A rank has one port for all its communicators. A message that starts occupies its sender's port for
the network's `overhead_s`, or for all of the message's latency if that is less. Messages start in
the order in which they were matched; those matched at one instant, in the order of their sends.
"""

from __future__ import annotations

import gc
import heapq
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from dtlab.errors import Deadlock, RunTimeout
from dtlab.matching import check_match, describe
from dtlab.simulator.changes import Changes
from dtlab.simulator.messages import Channel, Mailbox, Message
from dtlab.simulator.network import ARRIVED, Network
from dtlab.simulator.strands import Errand, Strand
from dtlab.simulator.waiting import hint, table
from dtlab.topology import Topology
from dtlab.trace import Rows


class Instant:
    """What is due at one instant, in order of planning."""

    __slots__ = ("alarms", "arriving", "entering", "starting", "waking")

    def __init__(self) -> None:
        self.arriving: list[Message] = []  # the last byte comes, if no rate changes until then
        self.starting: list[Message] = []  # the sender's port is free
        self.entering: list[Message] = []  # the latency has passed
        self.waking: list[Strand | Errand] = []  # the strand has slept enough
        # The strand has waited enough for one of those.
        self.alarms: list[tuple[Strand, Sequence[Message]]] | None = None


class Engine:
    """Runs strands over a network in virtual time; see the module's text."""

    def __init__(self, topology: Topology, *, gamma: float, eager_bytes: float, trace: bool):
        self.topology = topology
        self.gamma = gamma
        self.eager_bytes = eager_bytes or -1  # even empty messages wait for their receivers
        self.now = 0.0
        self.order = 0  # of the last message that found no partner at once
        self.stopping = False
        self.tracing = trace
        self.messages = Rows(10)  # the fields of trace.Message
        self.spans: list[tuple[Any, ...]] = []  # the fields of trace.Span
        self.meetings: dict[Any, dict[int, Any]] = {}  # see SimComm._agree
        self._channels: dict[tuple[Any, int, int], Channel] = {}
        self._mailboxes: dict[tuple[Any, int], Mailbox] = {}
        self._network = Network(topology)
        self._overhead_s = topology.overhead_s
        self._port_free_s = [0.0] * topology.ranks  # when each rank can start another message
        self._matched: list[Message] = []  # at this instant
        self._ready: deque[Strand | Errand] = deque()
        self._agenda: dict[float, Instant] = {}
        self._times: list[float] = []  # the keys of the agenda, as a heap
        self._due_s = -1.0  # the agenda's entry for this time was asked for last:
        self._due: list[Message] = []  # what is to enter its links then
        self._changes = Changes(topology)
        self._change_s = self._changes.next_s
        for change in topology.changes:
            self._at(change.at_s)
        self._begun = False
        self._limit_s: float | None = None  # of real time
        self._broken: BaseException | None = None  # why `next_strand` gave up

    # ---- the clock -----------------------------------------------------------------------------

    def run(self, strands: Sequence[Strand], timeout: float | None) -> None:
        """Run all strands to their ends. Raises `Deadlock` or `RunTimeout`. The rows of the trace
        are in `messages` and `spans` afterwards."""
        self._limit_s = None if timeout is None else time.monotonic() + timeout
        try:
            with _seldom_collecting():
                self._drive(strands)
        finally:
            self.stopping = True
            for strand in strands:
                if not strand.done:
                    strand.stop()

    def _drive(self, strands: Sequence[Strand]) -> None:
        for strand in strands:  # the first steps of each; nobody hands over meanwhile
            strand.resume()
            if self.stopping:
                return
        self._begun = True
        while following := self.next_strand():
            following.resume()
        if isinstance(self._broken, RunTimeout):
            raise RunTimeout(str(self._broken), table(strands))
        if self._broken is not None:
            raise self._broken
        if not self.stopping and not all(strand.done for strand in strands):
            why = self._failed_links() or hint(strands)
            raise Deadlock("deadlock: every rank that is left waits for another" + why,
                           table(strands))

    def _failed_links(self) -> str:
        """Which failed links messages wait for, in words; "" if none."""
        ends = [self.topology.ends(link) for link in self._network.blocked()]
        links = ", ".join(f"{a} → {b}" for a, b in ends)
        return f": messages wait for a link that has failed: {links}" if links else ""

    def next_strand(self) -> Strand | None:
        """The strand to go on next, once the clock has moved as far as it takes. None: there is
        none, for all are done, or for a reason that `run` will raise.

        Called by whoever pauses, so that control passes from strand to strand directly.
        """
        ready = self._ready
        if self.stopping or not self._begun:
            return None
        try:
            while True:
                if not ready:
                    self._pass_time()
                    if not ready:
                        return None
                following = ready.popleft()
                if isinstance(following, Strand):
                    return following
                following.go_on()
        except BaseException as error:  # must not surface in the rank that happened to pause
            self._broken = error
            return None

    def _pass_time(self) -> None:
        """Move the clock on until a strand can go on, or nothing is due any more."""
        torch.set_grad_enabled(False)  # bytes that arrive leave no history; strands set their own
        network, ready, agenda = self._network, self._ready, self._agenda
        while not ready:
            if self._limit_s is not None and time.monotonic() > self._limit_s:
                raise RunTimeout("the simulation did not end within its limit of real time")
            if self._matched:
                self._start_matched()
            arriving_s = -1.0
            for flow in network.settle(self.now):
                if flow.end_s != arriving_s:  # as a rule many end at once
                    arriving_s = flow.end_s
                    arriving = self._at(arriving_s).arriving
                arriving.append(flow)  # type: ignore[arg-type]
            if not self._times:
                return
            self.now = now = heapq.heappop(self._times)
            instant = agenda.pop(now)
            self._due_s = -1.0
            if now >= self._change_s:
                self._change_links()
            self._deliver(network.end(instant.arriving, now))
            for message in instant.starting:
                self._start(message)
            network.start(instant.entering, now)
            ready.extend(instant.waking)
            if instant.alarms is not None:
                self._ring(instant.alarms)

    def _change_links(self) -> None:
        """Apply the changes of links that are due."""
        for link, capacity_Bps, growth_s in self._changes.due(self.now):
            self._network.change(link, capacity_Bps)
            if growth_s:
                for channel in self._channels.values():
                    if link in channel.links:
                        channel.latency_s += growth_s
        self._change_s = self._changes.next_s

    def _at(self, when_s: float) -> Instant:
        """What is due at virtual time `when_s`, to be added to."""
        instant = self._agenda.get(when_s)
        if instant is None:
            instant = self._agenda[when_s] = Instant()
            heapq.heappush(self._times, when_s)
        return instant

    def wake(self, strand: Strand) -> None:
        """Let a paused strand go on at this instant."""
        self._ready.append(strand)

    def sleep(self, strand: Strand, seconds: float) -> None:
        """Called on `strand`: pause it for virtual `seconds`."""
        self._at(self.now + seconds).waking.append(strand)
        strand.pause()

    def wake_after(self, seconds: float, errand: Errand) -> None:
        """Let `errand` go on once virtual `seconds` have passed."""
        self._at(self.now + seconds).waking.append(errand)

    def wait_any(self, strand: Strand, messages: Sequence[Message], seconds: float) -> None:
        """Called on `strand`: pause it until one of `messages` has arrived, or virtual `seconds`
        have passed."""
        instant = self._at(self.now + seconds)
        instant.alarms = instant.alarms or []
        instant.alarms.append((strand, messages))
        strand.any_of = messages
        for message in messages:
            message.receiver = strand
        strand.pause()

    def _ring(self, alarms: list[tuple[Strand, Sequence[Message]]]) -> None:
        for strand, messages in alarms:
            if strand.any_of is messages:
                _forget_others(strand)
                self._ready.append(strand)

    # ---- messages ------------------------------------------------------------------------------

    def channel(self, context: tuple[Any, ...], src: int, dst: int, peer: int) -> Channel:
        """The channel from `src` to `dst` (ranks of the run) in one communicator's context."""
        key = (context, src, dst)
        if key not in self._channels:
            mailbox = self.mailbox(context, dst)
            channel = self._channels[key] = Channel(src, dst, peer, mailbox, self.topology)
            for link, slower_s in self._changes.slower_s.items():
                if link in channel.links:
                    channel.latency_s += slower_s
        return self._channels[key]

    def mailbox(self, context: tuple[Any, ...], dst: int) -> Mailbox:
        """Where `dst` receives the messages of one communicator's context."""
        return self._mailboxes.setdefault((context, dst), Mailbox())

    def match(self, message: Message) -> None:
        """Both sides are there: let it move, if they fit together. Else raises `ShapeMismatch`."""
        x, into = message.x, message.into
        if not (
            x.dtype is into.dtype
            and message.nbytes == into.nbytes
            and (x.ndim == into.ndim == 1 or x.shape == into.shape)  # the first is the cheaper
            and message.label == message.wanted_label
        ):
            channel = message.channel
            check_match(describe(x, message.label), channel.src,
                        describe(into, message.wanted_label), channel.dst)
        if not message.left:
            self._matched.append(message)
        elif message.end_s == ARRIVED:  # it was sent eagerly
            with torch.no_grad():
                self._deliver([message])

    def leave(self, message: Message) -> None:
        """Send `message` on its way although nobody has asked for it yet."""
        self._matched.append(message)

    def _start_matched(self) -> None:
        """Every rank waits: let the messages matched at this instant occupy their ports."""
        now, overhead_s, free_s = self.now, self._overhead_s, self._port_free_s
        self._matched.sort(key=_order)
        for message in self._matched:
            channel = message.channel
            start_s = message.start_s = max(now, free_s[channel.src])
            free_s[channel.src] = start_s + min(overhead_s, channel.latency_s)
            if start_s == now:
                self._start(message)
            else:
                self._at(start_s).starting.append(message)
        self._matched.clear()

    def _start(self, message: Message) -> None:
        """`message` starts now: its bytes enter their links once its latency has passed."""
        message.remaining = message.nbytes
        message.links = message.channel.links
        due_s = self.now + message.channel.latency_s
        if due_s != self._due_s:  # as a rule many start at once
            self._due_s, self._due = due_s, self._at(due_s).entering
        self._due.append(message)

    def _deliver(self, messages: Sequence[Message]) -> None:
        """Put the data in place and let both sides go on."""
        now, ready, record = self.now, self._ready, self.messages.extend
        for m in messages:
            if m.into is None:  # sent eagerly, and nobody has asked for it yet
                continue
            if m.real:
                _put(m.into, m.x)
            if self.tracing:
                channel = m.channel
                record((channel.src, channel.dst, m.nbytes, m.sent_s, m.wanted_s, m.start_s, now,
                        m.label, 0, 0))
            m.left = m.arrived = True
            if m.sender is not None:
                ready.append(m.sender)
            receiver = m.receiver
            if receiver is not None:
                ready.append(receiver)
                if receiver.any_of and isinstance(receiver, Strand):
                    _forget_others(receiver)


_order = attrgetter("order")


def _forget_others(strand: Strand) -> None:
    """`strand` goes on: whatever else it has waited for shall not wake it once more."""
    for message in strand.any_of:
        message.receiver = None
    strand.any_of = ()


def _put(into: Any, x: Any) -> None:
    """Copy `x` into its place."""
    if isinstance(into, torch.Tensor) and into.is_inference():
        with torch.inference_mode():  # where else torch refuses to change it
            into.copy_(x)
    else:
        into.copy_(x)


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Inside, search for unreachable cycles only once in a while: messages come and go by the
    million, without cycles."""
    before = gc.get_threshold()
    gc.set_threshold(1_000_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
