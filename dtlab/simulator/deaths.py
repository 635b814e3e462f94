"""Ranks that die while others go on: whose connections are closed, and who forms the next
communicator (`Comm.shrink`).

The k-th *generation* of communicators is made of the communicator that the k-th shrink returned.
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
        self._generations = [0] * ranks  # in which each rank is
        self._last_generation = 0, list(range(ranks))  # the last generation, and its ranks
        self._members = set(range(ranks))  # those of them that neither died nor returned
        self._asking: dict[int, Strand] = {}  # ranks that have called shrink, or are new

    def died(self, rank: int) -> None:
        """`rank` has just crashed."""
        now, agenda = self._engine.now, self._engine.agenda
        if self._detect_s is not None:
            number = self._generations[rank]
            agenda.at(now + self._detect_s).calls.append(lambda: self.close(number, rank))
        if self._restart_s is not None and self._members:
            agenda.at(now + self._restart_s).calls.append(lambda: self._restart(rank))
        self.left(rank)

    def left(self, rank: int) -> None:
        """`rank` has died or returned: nobody need wait for it to shrink."""
        self._members.discard(rank)
        self._asking.pop(rank, None)
        self._new_group_if_all_ask()
        if not self._members:  # those that were started anew have nobody to join
            for new in [*self._asking]:
                self._engine.crash(new)

    def joining(self) -> bool:
        """Does a rank that was started anew wait for the others?"""
        return bool(self._asking.keys() - self._members)

    def shrink(self, rank: int) -> tuple[int, list[int]]:
        """Wait, on the strand of `rank`, for all that live. Returns the number of the new
        generation, and its ranks."""
        engine, strand = self._engine, self._engine.running
        if rank in self._members:
            self.close(self._generations[rank], rank)
            for work in [work for work in engine.unwaited if work.rank == rank]:
                work._detach()
        if not self._members:
            raise Crashed  # started anew, when nobody is left to join
        self._asking[rank] = strand
        self._new_group_if_all_ask()
        if rank in self._asking:
            strand.waits_for = "shrink"
            engine.wait_for(self, "")
        return self._last_generation

    def _new_group_if_all_ask(self) -> None:
        if self._members and self._members <= self._asking.keys():
            self._members = set(self._asking)
            number, ranks = self._last_generation[0] + 1, sorted(self._members)
            self._last_generation = number, ranks
            for rank in ranks:  # before any of them goes on: a stream of one may crash first
                self._generations[rank] = number
            asking, self._asking = self._asking, {}
            for _, strand in sorted(asking.items()):
                if strand is not self._engine.running:
                    self._engine.wake(strand)

    def _restart(self, rank: int) -> None:
        self._engine.crashed.discard(rank)
        self._engine.add_strand(self._start(rank))

    def close(self, number: int, rank: int) -> None:
        """Let nothing get through any more between `rank` and others of that generation; those who
        wait for it wait in vain, and what was on its way changes nothing."""
        engine = self._engine
        engine.channels.close(number, rank)
        for work in engine.unwaited:
            _cut([message] if (message := getattr(work, "message", None)) else [])
        for strand in engine.strands:
            if strand.done:
                continue
            waits = open_messages(strand)
            cut = _cut(waits) and (strand.awaits is ANY or strand.awaits in waits)
            if (cut or _is_open(strand.waits_for)) and strand.awaits is not None:
                strand.awaits = None
                engine.wake(strand)  # once: what has come has woken it already

    def check(self, strand: Strand) -> None:
        """Raise `RankDied` if the strand waits for a message that can't come any more."""
        for message in open_messages(strand):
            if message.channel.closed and not isinstance(strand.waits_for, list):
                raise broken(strand.rank, message.channel.src, message.channel.dst)

    def closed(self, context: tuple[object, ...], ranks: Sequence[int]) -> int | None:
        """One of `ranks` whose connections in that context's generation are closed, if any is."""
        number = generation(context)
        return next((r for r in ranks if (number, r) in self._engine.channels.closed), None)


def _is_open(call: object) -> bool:
    """Is it one that not all ranks have made?"""
    return isinstance(call, Agreement) and len(call.made) < len(call.ranks)


def _cut(messages: Sequence[PendingMessage]) -> list[PendingMessage]:
    """Have messages across a closed channel arrive nowhere any more. Returns those."""
    closed = [message for message in messages if message.channel.closed]
    for message in closed:
        message.into = None
    return closed


def broken(rank: int, *ends: int) -> RankDied:
    """The error of `rank`, which has waited for a message between these two."""
    peer = next(end for end in ends if end != rank)
    who = "a rank" if peer == ANY_SOURCE else f"rank {peer}"
    return RankDied(f"rank {rank}: the connection to {who} has broken", peer)
