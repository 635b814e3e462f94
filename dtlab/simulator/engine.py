"""The engine: one clock, one queue of events, and the rule that time moves only when every rank
waits.

The states of a message: *posted* by one side; *matched* when the other side posts too; *started*
as soon as its sender's port is free; *moving* once its latency has passed; *arrived*. Ties are
broken by order of posting, so that equal inputs give equal traces, bit for bit.

A rank has one port for all its communicators. A message that starts occupies its sender's port for
the network's `overhead_s`, or for all of the message's latency if that is less. Messages start in
the order in which they were matched; those matched at one instant, in the order of their sends.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from dtlab.errors import Deadlock, RunTimeout
from dtlab.ranks.matching import check_match, describe
from dtlab.simulator.changes import Changes
from dtlab.simulator.event_queue import EventQueue
from dtlab.simulator.messages import Channels, PendingMessage, put
from dtlab.simulator.network import ARRIVED, Network
from dtlab.simulator.strands import Strand
from dtlab.simulator.waiting import CRASHED, hint, table
from dtlab.topology import Topology
from dtlab.trace import Rows

DELIVERED = object()  # replaces a delivered message's tensors, so that they may be freed
ANY = object()  # `Strand.wakes_on` of a strand that waits for any of `Strand.any_of`


class Engine:
    """Runs strands over a network in virtual time; see the module's text."""

    def __init__(self, topology: Topology, *, gamma: float, eager_bytes: float, trace: bool):
        self.topology = topology
        self.gamma = gamma
        self.eager_bytes = eager_bytes or -1  # so that not even empty messages are eager
        self.now = 0.0
        self.order = 0  # of the last message or receive that was posted
        self.stopping = False
        self.tracing = trace
        self.messages = Rows(10)  # the fields of trace.Message
        self.spans: list[tuple[Any, ...]] = []  # the fields of trace.Span
        self.waits: list[tuple[Any, ...]] = []  # the fields of trace.Span
        self.running: Strand  # the strand that runs now
        self.unwaited: dict[Any, Any] = {}  # works not waited for → lines that began them
        self.crashed: set[int] = set()
        self.deaths: Any = None  # a `Deaths`, which builds on this module
        self.failure: tuple[int, BaseException] | None = None  # which rank raised, and what
        self.agreements: dict[Any, dict[int, Any]] = {}  # see SimComm._all_gather_objects
        self.strands: list[Strand] = []
        self._streams: Counter[int] = Counter()  # how many each rank has
        self._network = Network(topology)
        self._overhead_s = topology.overhead_s
        self._port_free_s = [0.0] * topology.ranks  # when each rank can start another message
        self.matched: list[PendingMessage] = []  # at this instant, or sent eagerly
        self._ready: deque[Strand] = deque()
        self.events = EventQueue()
        self._changes = Changes(topology)
        self.channels = Channels(topology, self._changes.extra_latency_s)
        self._change_s = self._changes.next_s
        for change in topology.changes:
            self.events.at(change.at_s)
        self._started = False
        self._limit_s: float | None = None  # of real time
        self._error: BaseException | None = None  # raised inside `next_strand`

    # ---- the clock -----------------------------------------------------------------------------

    def run(self, strands: Sequence[Strand], timeout: float | None) -> None:
        """Run all strands to their ends. Raises `Deadlock` or `RunTimeout`. The rows of the trace
        are in `messages`, `spans` and `waits` afterwards; if a rank raised, that is `failure`."""
        self.strands = list(strands)
        self._limit_s = None if timeout is None else time.monotonic() + timeout
        try:
            with _seldom_collecting():
                self._drive()
        finally:
            self.stopping = True
            for strand in self.strands:
                self.running = strand
                strand.stop()

    def _drive(self) -> None:
        for strand in self.strands[:]:  # up to the first pause of each
            self.running = strand
            strand.resume()
            if self.stopping:
                return
        self._started = True
        while following := self.next_strand():
            following.resume()
        if isinstance(self._error, RunTimeout):
            raise RunTimeout(str(self._error), table(self.strands))
        if self._error is not None:
            raise self._error
        if not self.stopping and any(strand.is_busy() for strand in self.strands):
            why = self._failed_links() or hint(self.strands)
            stuck = Deadlock("deadlock: every rank that is left waits for another" + why,
                             table(self.strands))
            if self.crashed and not self.channels.closed:
                stuck.add_note("Nobody notices a crash: with detect_s=… waits for a crashed rank "
                               "end with RankDied, detect_s seconds after it.")
            raise stuck

    def add_stream(self, body: Callable[[Strand], None]) -> Strand:
        """Add a strand of the running rank, which runs `body` as soon as the running one pauses."""
        rank = self.running.rank
        self._streams[rank] += 1
        return self.add_strand(self.running.new_strand(self._streams[rank], body))

    def add_strand(self, strand: Strand) -> Strand:
        """Begin `strand` at this instant. Returns it."""
        self.strands.append(strand)
        self._ready.append(strand)
        return strand

    def fail(self, rank: int, error: BaseException) -> None:
        """`rank` has raised `error`, which ends the run. The first one is reported."""
        self.failure = self.failure or (rank, error)
        self.stopping = True

    def crash(self, rank: int) -> None:
        """End `rank` and its streams at once. What they have posted still arrives."""
        self.crashed.add(rank)
        for strand in self.strands:
            if strand.rank == rank:
                self.end_wait(strand)
                strand.done, strand.waits_for = True, CRASHED
        self.deaths.rank_died(rank)

    def _failed_links(self) -> str:
        """Name the failed links that messages wait for, in words; "" if none."""
        ends = [self.topology.ends(link) for link in self._network.blocked()]
        links = ", ".join(f"{a} → {b}" for a, b in ends)
        return f": messages wait for a link that has failed: {links}" if links else ""

    def next_strand(self) -> Strand | None:
        """Move the clock until a strand can run, and return it. None: all are done, or all are
        stuck, or `run` will raise `_error`. Called by the strand that pauses."""
        ready = self._ready
        if self.stopping or not self._started:
            return None
        try:
            while True:
                if not ready:
                    self._pass_time()
                    if not ready:
                        return None
                following = ready.popleft()
                if not following.done:  # else its rank has crashed
                    self.running = following
                    return following
        except RecursionError as error:  # the rank's own calls have used up the stack
            self.fail(self.running.rank, error)
            return None
        except BaseException as error:  # not for the rank that happened to pause
            self._error, self.stopping = error, True
            return None

    def _pass_time(self) -> None:
        """Move the clock until a strand can run, or no event is left."""
        torch.set_grad_enabled(False)  # for delivery; strands restore their own
        network, ready, events = self._network, self._ready, self.events
        while not ready:
            if self._limit_s is not None and time.monotonic() > self._limit_s:
                raise RunTimeout("the simulation did not end within its limit of real time")
            if self.matched:
                self._start_matched()
            arriving_s = -1.0
            for flow in network.settle(self.now):
                if flow.end_s != arriving_s:  # as a rule many end at once
                    arriving_s = flow.end_s
                    arriving = self.events.at(arriving_s).arriving
                arriving.append(flow)  # type: ignore[arg-type]
            if not events:
                return
            self.now, instant = events.pop()
            now = self.now
            if now >= self._change_s:
                self._change_links()
            self._deliver(network.end(instant.arriving, now))
            network.start(instant.entering, now)
            ready.extend(instant.waking)
            self._expire(instant.timeouts)
            for call in instant.calls:
                call()

    def _change_links(self) -> None:
        """Apply the changes of links that are due."""
        for link, capacity_Bps, growth_s in self._changes.due(self.now):
            self._network.change(link, capacity_Bps)
            if growth_s:
                self.channels.slow_down(link, growth_s)
                self.events.delay(link, self.now)
        self._change_s = self._changes.next_s

    def wake(self, strand: Strand) -> None:
        """Let a paused strand run at this instant."""
        self._ready.append(strand)

    def sleep(self, seconds: float) -> None:
        """Pause the running strand for virtual `seconds` that count as work, not as a wait."""
        strand = self.running
        self.end_wait(strand)
        self.events.at(self.now + seconds).waking.append(strand)
        strand.pause()
        strand.idle_since_s = self.now

    def wait_for(self, what: object, label: str) -> None:
        """Pause the running strand until `what`, a message or a begun function, is done."""
        strand = self.running
        if strand.label is not label:
            self.end_wait(strand, label)
        if self.channels.closed:
            self.deaths.check(strand)
        strand.wakes_on, strand.handled_error = what, sys.exception()
        strand.pause()
        if self.channels.closed:
            self.deaths.check(strand)

    def end_wait(self, strand: Strand, label: str = "") -> None:
        """Record the wait of `strand` that ends now; if another begins, `label` is its label."""
        if self.tracing and self.now > strand.idle_since_s:
            self.waits.append((strand.rank, "wait", strand.idle_since_s, self.now, strand.label,
                               strand.stream))
        strand.idle_since_s, strand.label = self.now, label

    def wait_for_any(self, what: Sequence[object], label: str, seconds: float | None) -> None:
        """Pause the running strand until one of `what` is done, or virtual `seconds` have passed.
        No other wait may use the same list."""
        strand = self.running
        if seconds is not None:
            self.events.at(self.now + seconds).timeouts.append((strand, what))
        strand.any_of = what
        self.wait_for(ANY, label)

    def done(self, what: object, strand: Strand) -> None:
        """`what` is done: wake `strand` if it waits for that."""
        if strand.wakes_on is what or (strand.wakes_on is ANY and what in strand.any_of):
            strand.wakes_on = None
            self._ready.append(strand)

    def _expire(self, timeouts: list[tuple[Strand, Sequence[object]]]) -> None:
        for strand, what in timeouts:
            if strand.wakes_on is ANY and strand.any_of is what:
                strand.wakes_on = None
                self._ready.append(strand)

    # ---- messages ------------------------------------------------------------------------------

    def match(self, message: PendingMessage, sent_label: str, wanted_label: str) -> None:
        """Both sides are posted: let the message start. Raises `ShapeMismatch` if they differ."""
        x, into = message.x, message.into
        if not (
            x.dtype is into.dtype
            and message.nbytes == into.nbytes
            and x.shape == into.shape
            and sent_label == wanted_label
        ):
            check_match(describe(x, sent_label), message.channel.src,
                        describe(into, wanted_label), message.channel.dst)
        if not message.send_done:
            self.matched.append(message)
        elif message.end_s == ARRIVED:  # it was sent eagerly
            with torch.no_grad():
                self._deliver([message])

    def _start_matched(self) -> None:
        """Let the messages matched at this instant occupy their ports, once all ranks wait."""
        now, overhead_s, free_s = self.now, self._overhead_s, self._port_free_s
        self.matched.sort(key=_order)
        due_s = -1.0
        for message in self.matched:
            channel = message.channel
            src, latency_s = channel.src, channel.latency_s
            message.start_s = start_s = free_s[src] if free_s[src] > now else now
            free_s[src] = start_s + (overhead_s if overhead_s < latency_s else latency_s)
            enters_s = start_s + latency_s
            if enters_s != due_s:  # as a rule many enter at once
                due_s, due = enters_s, self.events.at(enters_s).entering
            due.append(message)
        self.matched.clear()

    def _deliver(self, messages: Sequence[PendingMessage]) -> None:
        """Copy the data into the receive buffers and wake both sides."""
        now, tracing = self.now, self.tracing
        record = self.messages.extend
        for m in messages:
            if m.into is None:  # sent eagerly; the receive is not posted
                continue
            sender, receiver = m.sender, m.receiver
            if m.real:
                try:
                    put(m.into, m.x)
                except Exception as error:  # an object that can't be unpickled
                    self.fail(receiver.rank, error)
                    return
            if tracing:
                record((sender.rank, receiver.rank, m.nbytes, m.sent_s, m.wanted_s, m.start_s, now,
                        m.label, sender.stream, receiver.stream))
            m.send_done = m.recv_done = True
            m.x = m.into = DELIVERED
            self.done(m, sender)
            self.done(m, receiver)


_order = attrgetter("order")


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Inside, search for cyclic garbage seldom: simulations make millions of objects, with few
    cycles, and would take up to half as long again."""
    before = gc.get_threshold()
    gc.set_threshold(1_000_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
