"""A rank that dies without a word, as processes do: `simulate(crash=…)`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dtlab.comm import Comm, Recv, Send, Work
from dtlab.simulator.communicator import SimComm
from dtlab.simulator.strands import Crashed


class CrashingComm(SimComm):
    """Crashes before its next event once it has had `limit` of them: an event is a call of `post`,
    a wait with a limit, a `compute` or a `shrink`, here or in a group or stream of it. What it has
    posted by then still arrives, unless others have noticed before."""

    def __init__(self, *where: Any, limit: float, events: Iterator[int] | None = None):
        super().__init__(*where)
        self._limit, self._events = limit, events or itertools.count()  # shared by all its groups

    def _make_group(self, ranks: Sequence[int], context: tuple[Any, ...]) -> SimComm:
        group = super()._make_group(ranks, context)
        return CrashingComm(group._engine, group._me, group._ranks, group._context,
                            limit=self._limit, events=self._events)

    def _count(self) -> None:
        if next(self._events) >= self._limit:
            raise Crashed

    def post(self, *ops: Send | Recv) -> list[Work]:
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

    def shrink(self) -> SimComm:
        self._count()
        return super().shrink()

    def of_survivors(self, number: int, ranks: list[int]) -> SimComm:
        return CrashingComm(self._engine, self._me, ranks, (number,), limit=self._limit,
                            events=self._events)

    send, recv, sendrecv, exchange = Comm.send, Comm.recv, Comm.sendrecv, Comm.exchange
