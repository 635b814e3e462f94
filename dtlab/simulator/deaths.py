"""Ranks that die while others go on: which connections close, and who is in the next communicator.

The communicators of *generation* k descend from the one that the k-th `Comm.shrink` returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dtlab.errors import RankDied
from dtlab.simulator.engine import ANY, Engine
from dtlab.simulator.messages import ANY_SOURCE, PendingMessage, generation
from dtlab.simulator.strands import Crashed, Strand
from dtlab.simulator.waiting import Agreement, open_messages


class Deaths:
    """detect_s: virtual seconds from a death until the others' waits for that rank end with
    `RankDied`; None: they never do. restart_s: until a dead rank is started anew; None: never.
    start: begins the function of a rank on a new strand."""

    def __init__(self, engine: Engine, ranks: int, detect_s: float | None,
                 restart_s: float | None, start: Callable[[int], Strand]):
        self._engine, self._detect_s, self._restart_s = engine, detect_s, restart_s
        self._start = start
        self._generations = [0] * ranks  # by rank
        self._last_generation = 0, list(range(ranks))  # its number, and its ranks
        self._members = set(range(ranks))  # its ranks that have neither died nor returned
        self._shrinking: dict[int, Strand] = {}  # by rank: it has called shrink, or was restarted

    def rank_died(self, rank: int) -> None:
        """`rank` has just crashed."""
        now, events = self._engine.now, self._engine.events
        if self._detect_s is not None:
            number = self._generations[rank]
            events.at(now + self._detect_s).calls.append(lambda: self.disconnect(number, rank))
        if self._restart_s is not None and self._members:
            events.at(now + self._restart_s).calls.append(lambda: self._restart(rank))
        self.rank_ended(rank)

    def rank_ended(self, rank: int) -> None:
        """`rank` has died or returned: `shrink` does not wait for it."""
        self._members.discard(rank)
        self._shrinking.pop(rank, None)
        self._shrink_if_all_called()
        if not self._members:
            for restarted in [*self._shrinking]:  # they have nobody to join
                self._engine.crash(restarted)

    def joining(self) -> bool:
        """Does a restarted rank wait for the others?"""
        return bool(self._shrinking.keys() - self._members)

    def shrink(self, rank: int) -> tuple[int, list[int]]:
        """Block the strand of `rank` until all living ranks have called this. Returns the number of
        the new generation, and its ranks."""
        engine, strand = self._engine, self._engine.running
        if rank in self._members:
            self.disconnect(self._generations[rank], rank)
            for work in [work for work in engine.unwaited if work.rank == rank]:
                work._detach()
        if not self._members:
            raise Crashed  # a restarted rank with nobody to join
        self._shrinking[rank] = strand
        self._shrink_if_all_called()
        if rank in self._shrinking:
            strand.waits_for = "shrink"
            engine.wait_for(self, "")
        return self._last_generation

    def _shrink_if_all_called(self) -> None:
        if self._members and self._members <= self._shrinking.keys():
            self._members = set(self._shrinking)
            number, ranks = self._last_generation[0] + 1, sorted(self._members)
            self._last_generation = number, ranks
            for rank in ranks:  # before any of them runs: a stream may crash first
                self._generations[rank] = number
            asking, self._shrinking = self._shrinking, {}
            for _, strand in sorted(asking.items()):
                if strand is not self._engine.running:
                    self._engine.wake(strand)

    def _restart(self, rank: int) -> None:
        self._engine.crashed.discard(rank)
        self._engine.add_strand(self._start(rank))

    def disconnect(self, number: int, rank: int) -> None:
        """Close the channels between `rank` and others in generation `number`. Strands that wait
        for it raise `RankDied`; messages under way are not delivered."""
        engine = self._engine
        engine.channels.close(number, rank)
        for work in engine.unwaited:
            _drop_closed([message] if (message := getattr(work, "message", None)) else [])
        for strand in engine.strands:
            if strand.done:
                continue
            waits = open_messages(strand)
            closed = _drop_closed(waits) and (strand.wakes_on is ANY or strand.wakes_on in waits)
            if (closed or _is_open(strand.waits_for)) and strand.wakes_on is not None:
                strand.wakes_on = None  # so that nothing wakes it twice
                engine.wake(strand)

    def check(self, strand: Strand) -> None:
        """Raise `RankDied` if the strand waits for a message of a closed channel."""
        for message in open_messages(strand):
            if message.channel.closed and not isinstance(strand.waits_for, list):
                raise connection_broken(strand.rank, message.channel.src, message.channel.dst)

    def disconnected(self, context: tuple[object, ...], ranks: Sequence[int]) -> int | None:
        """Return the first of `ranks` that is disconnected in the generation of `context`."""
        number = generation(context)
        return next((r for r in ranks if (number, r) in self._engine.channels.closed), None)


def _is_open(call: object) -> bool:
    """Is `call` an agreement that some rank has not called?"""
    return isinstance(call, Agreement) and len(call.made) < len(call.ranks)


def _drop_closed(messages: Sequence[PendingMessage]) -> list[PendingMessage]:
    """Drop the messages of closed channels: they will not be delivered. Returns them."""
    closed = [message for message in messages if message.channel.closed]
    for message in closed:
        message.into = None
    return closed


def connection_broken(rank: int, *ends: int) -> RankDied:
    """Return the error of `rank`, which waits for a message between the ranks `ends`."""
    peer = next(end for end in ends if end != rank)
    who = "a rank" if peer == ANY_SOURCE else f"rank {peer}"
    return RankDied(f"rank {rank}: the connection to {who} has broken", peer)
