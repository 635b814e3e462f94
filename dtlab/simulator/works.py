"""The works that `post` and `begin` return."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from dtlab.comm import Work
from dtlab.errors import RankDied, UnwaitedWork
from dtlab.ranks.matching import Header
from dtlab.simulator.deaths import connection_broken
from dtlab.simulator.engine import Engine
from dtlab.simulator.lines import SourceLine
from dtlab.simulator.messages import Channel, PendingMessage, ReceiveQueue
from dtlab.simulator.strands import Strand


class SimWork(Work):
    """A `Work` of `rank` of the run. `Engine.unwaited` holds it until it is waited for."""

    __slots__ = ("_engine", "rank")
    error: BaseException | None = None  # what it raised, if it is a function

    def __init__(self, engine: Engine, rank: int, line: SourceLine | None):
        self._engine, self.rank = engine, rank
        engine.unwaited[self] = line

    @abstractmethod
    def is_done(self) -> bool:
        """Does `wait` return, or raise, at once?"""

    @abstractmethod
    def wake_when_done(self, strand: Strand) -> object:
        """Have the end of this work wake `strand`. Returns the object to wait for."""

    @abstractmethod
    def __str__(self) -> str:
        """The call that began it, in the numbering of the run: "isend to 1 of 40 bytes"."""

    def _detach(self) -> None:
        self._engine.unwaited.pop(self, None)

    def cancel(self) -> None:
        self._detach()


class MessageWork(SimWork):
    """One end of a message."""

    __slots__ = ("_strand", "message")

    def __init__(self, engine: Engine, rank: int, line: SourceLine | None, message: PendingMessage):
        super().__init__(engine, rank, line)
        self.message, self._strand = message, engine.running

    def _detach(self) -> None:
        super()._detach()
        self._strand.posted.pop(self, None)

    @property
    def is_broken(self) -> bool:
        """Has the other side died, or called shrink, before the message was complete?"""
        return self.message.channel.closed and not self._is_complete()

    def is_done(self) -> bool:
        return self._is_complete() or self.is_broken

    @abstractmethod
    def _is_complete(self) -> bool:
        """Is this end of the message complete?"""

    def _finish(self) -> None:
        engine = self._engine
        self._detach()
        if self.is_broken:
            raise connection_broken(self.rank, self.message.channel.src, self.message.channel.dst)
        if not self._is_complete():
            strand = engine.running
            strand.waits_for = (self.message,)
            engine.wait_for(self.wake_when_done(strand), self.message.label)


class Sending(MessageWork):
    """The sender's end of a message to rank `dst` of its communicator."""

    __slots__ = ("_dst",)

    def __init__(self, engine: Engine, rank: int, line: SourceLine | None, message: PendingMessage,
                 dst: int):
        super().__init__(engine, rank, line, message)
        self._dst = dst

    def wait(self) -> int:
        self._finish()
        return self._dst

    def _is_complete(self) -> bool:
        return self.message.send_done

    def wake_when_done(self, strand: Strand) -> object:
        self.message.sender = strand
        return self.message

    def __str__(self) -> str:
        return f"isend to {self.message.channel.dst} of {self.message.nbytes:,} bytes"


class Receiving(MessageWork):
    """The receiver's end of a message; anyone: what it is received into, if it is from anyone."""

    __slots__ = ("_anyone", "_queue")

    def __init__(self, engine: Engine, rank: int, line: SourceLine | None, message: PendingMessage,
                 anyone: Header | None):
        super().__init__(engine, rank, line, message)
        self._anyone = anyone
        self._queue: ReceiveQueue | None = message.channel.from_anyone
        message.channel.from_anyone.add(anyone)

    def wait(self) -> int:
        if self._queue is not None:
            self._queue.discard(self._anyone)
            self._queue = None
        self._finish()
        peer: int = self.message.channel.peer
        return peer

    def _is_complete(self) -> bool:
        return self.message.recv_done

    def wake_when_done(self, strand: Strand) -> object:
        self.message.receiver = strand
        return self.message

    def __str__(self) -> str:
        source = self.message.channel
        text = f"irecv from {source.src if isinstance(source, Channel) else 'anyone'}"
        m = self.message
        size = m.nbytes if m.recv_done else m.into.nbytes  # -1: an object's is not known
        return text if size < 0 else f"{text} of {size:,} bytes"


def failure(unwaited: Mapping[Any, SourceLine | None], crashed: Collection[int],
            errors_only: bool = False) -> tuple[int, BaseException] | None:
    """Return (rank, error) for the works that were not waited for. The errors of begun functions
    come first. Works of crashed ranks don't count; once a death was noticed, none does, as it may
    be impossible to complete."""
    works = [work for work in unwaited if work.rank not in crashed]
    for work in works:
        if work.error is not None and not isinstance(work.error, RankDied):
            return work.rank, work.error
    if not works or errors_only or works[0]._engine.channels.closed:
        return None
    rank = works[0].rank
    mine = [work for work in works if work.rank == rank]
    return rank, UnwaitedWork.of(rank, [
        f"{work}, at {unwaited[work]}" if unwaited[work] else str(work) for work in mine],
        [work.owed for work in mine])
