"""The agenda of virtual time: what happens when."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from dtlab.errors import ConfigError
from dtlab.simulator.messages import PendingMessage
from dtlab.simulator.strands import Strand


class Instant:
    """The events of one instant, in order of planning."""

    __slots__ = ("arriving", "calls", "entering", "timeouts", "waking")

    def __init__(self) -> None:
        self.arriving: list[PendingMessage] = []  # the last byte comes, unless rates change
        self.entering: list[PendingMessage] = []  # the latency has passed
        self.waking: list[Strand] = []  # the strand has slept enough
        self.calls: list[Callable[[], None]] = []  # rare: what follows a death
        # The strand has waited long enough for one of those.
        self.timeouts: list[tuple[Strand, Sequence[object]]] | None = None


class Agenda:
    """The instants to come."""

    def __init__(self) -> None:
        self._instants: dict[float, Instant] = {}
        self._times: list[float] = []  # their times, as a heap

    def at(self, when_s: float) -> Instant:
        """Return what is due at virtual time `when_s`, to be added to."""
        if when_s == math.inf:
            raise ConfigError("the virtual clock can't hold that many seconds")
        instant = self._instants.get(when_s)
        if instant is None:
            instant = self._instants[when_s] = Instant()
            heapq.heappush(self._times, when_s)
        return instant

    def pop(self) -> tuple[float, Instant]:
        """Take out the next one, which there is: (when, what)."""
        when_s = heapq.heappop(self._times)
        return when_s, self._instants.pop(when_s)

    def delay(self, link: int, now_s: float) -> None:
        """The latency of `link` has changed: messages that start from now on, because their ports
        were busy, enter their links at another time."""
        for instant in list(self._instants.values()):
            for message in instant.entering[:]:
                if message.start_s >= now_s and link in message.links:
                    instant.entering.remove(message)
                    enters_s = message.start_s + message.channel.latency_s
                    self.at(enters_s).entering.append(message)

    def __bool__(self) -> bool:
        return bool(self._times)
