"""Changes of links while a simulation runs: `Topology.changes`, applied in their order."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dtlab.topology import Change, Topology


class Changes:
    """The changes to come, and the present state of the links that have changed."""

    def __init__(self, topology: Topology):
        self._topology = topology
        # The last is due first; of two at one instant, the one that was given first.
        self._pending: list[Change] = sorted(topology.changes, key=lambda c: c.at_s)[::-1]
        self._bandwidth_Bps: dict[int, float] = {}
        self._load_Bps: dict[int, float] = {}  # others' traffic
        self._latency_s: dict[int, float] = {}
        self.extra_latency_s: dict[int, float] = {}  # by link: added to the topology's

    @property
    def next_s(self) -> float:
        """The time of the next change; infinity if there is none."""
        return self._pending[-1].at_s if self._pending else math.inf

    def due(self, now_s: float) -> Iterator[tuple[int, float, float]]:
        """Apply the changes up to `now_s`. Yields for each (link, its new capacity in bytes per
        second, the growth of its latency in seconds)."""
        while self.next_s <= now_s:
            change = self._pending.pop()
            link = change.link
            if change.bandwidth_Bps is not None:
                self._bandwidth_Bps[link] = change.bandwidth_Bps
            load_Bps = self._load_Bps[link] = self._load_Bps.get(link, 0.0) + change.load_Bps
            bandwidth_Bps = self._bandwidth_Bps.get(link, self._topology.capacity_Bps[link])
            growth_s = 0.0
            if change.latency_s is not None:
                growth_s = change.latency_s - self._latency_of(link)
                self._latency_s[link] = change.latency_s
                self.extra_latency_s[link] = self.extra_latency_s.get(link, 0.0) + growth_s
            yield link, max(bandwidth_Bps - load_Bps, 0.0), growth_s

    def _latency_of(self, link: int) -> float:
        if link not in self._latency_s:
            edge = self._topology.ends(link)
            edges = self._topology.graph().edges
            self._latency_s[link] = edges[edge]["latency_s"] if edge in edges else 0.0
        return self._latency_s[link]
