"""What is due at one instant of virtual time."""

from __future__ import annotations

from collections.abc import Sequence

from dtlab.simulator.messages import PendingMessage
from dtlab.simulator.strands import Notifier, Strand


class Instant:
    """What is due at one instant, in order of planning."""

    __slots__ = ("arriving", "entering", "starting", "timeouts", "waking")

    def __init__(self) -> None:
        self.arriving: list[PendingMessage] = []  # the last byte comes, unless rates change
        self.starting: list[PendingMessage] = []  # the sender's port is free
        self.entering: list[PendingMessage] = []  # the latency has passed
        self.waking: list[Strand] = []  # the strand has slept enough
        # The strand has waited long enough for one of those.
        self.timeouts: list[tuple[Strand, Sequence[Notifier]]] | None = None
