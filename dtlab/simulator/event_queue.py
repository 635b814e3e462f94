"""The events to come, in virtual time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from dtlab.errors import ConfigError
from dtlab.simulator.messages import PendingMessage
from dtlab.simulator.strands import Strand


class Instant:
    """The events of one instant, in the order in which they were scheduled."""

    __slots__ = ("arriving", "calls", "entering", "timeouts", "waking")

    def __init__(self) -> None:
        self.arriving: list[PendingMessage] = []  # the last byte arrives, unless rates change
        self.entering: list[PendingMessage] = []  # the latency has passed: bytes enter the links
        self.waking: list[Strand] = []  # a sleep ends
        self.calls: list[Callable[[], None]] = []  # consequences of a death
        self.timeouts: list[tuple[Strand, Sequence[object]]] = []  # of `Engine.wait_for_any`


class EventQueue:
    """A priority queue of instants."""

    def __init__(self) -> None:
        self._instants: dict[float, Instant] = {}
        self._times: list[float] = []  # their times, as a heap

    def at(self, when_s: float) -> Instant:
        """Return the events at virtual time `when_s`, for the caller to add to."""
        if when_s == math.inf:
            raise ConfigError("the virtual clock can't hold that many seconds")
        instant = self._instants.get(when_s)
        if instant is None:
            instant = self._instants[when_s] = Instant()
            heapq.heappush(self._times, when_s)
        return instant

    def pop(self) -> tuple[float, Instant]:
        """Remove and return the next instant and its time; there must be one."""
        when_s = heapq.heappop(self._times)
        return when_s, self._instants.pop(when_s)

    def delay(self, link: int, now_s: float) -> None:
        """The latency of `link` has changed: reschedule matched messages that have not started,
        because their ports are busy."""
        for instant in list(self._instants.values()):
            for message in instant.entering[:]:
                if message.start_s >= now_s and link in message.links:
                    instant.entering.remove(message)
                    enters_s = message.start_s + message.channel.latency_s
                    self.at(enters_s).entering.append(message)

    def __bool__(self) -> bool:
        return bool(self._times)
