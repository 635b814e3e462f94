"""Changes of links while a simulation runs: `Topology.changes`, applied in their order."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dtlab.topology import Change, Topology


class Changes:
    """The changes that are still to come, and the state of the links that they are about."""

    def __init__(self, topology: Topology):
        self._topology = topology
        # The last is due first; of two at one moment, the one that was given first.
        self._coming: list[Change] = sorted(topology.changes, key=lambda c: c.at_s)[::-1]
        self._bandwidth_Bps: dict[int, float] = {}
        self._load_Bps: dict[int, float] = {}  # others' traffic
        self._latency_s: dict[int, float] = {}
        self.slower_s: dict[int, float] = {}  # latency of a link, more than the topology says

    @property
    def next_s(self) -> float:
        """When the next one is due; infinity: none is."""
        return self._coming[-1].at_s if self._coming else math.inf

    def due(self, now_s: float) -> Iterator[tuple[int, float, float]]:
        """(link, its capacity from now on in bytes per second, its latency's growth in seconds) for
        each change that is due."""
        while self.next_s <= now_s:
            change = self._coming.pop()
            link = change.link
            if change.bandwidth_Bps is not None:
                self._bandwidth_Bps[link] = change.bandwidth_Bps
            load_Bps = self._load_Bps[link] = self._load_Bps.get(link, 0.0) + change.load_Bps
            bandwidth_Bps = self._bandwidth_Bps.get(link, self._topology.capacity_Bps[link])
            growth_s = 0.0
            if change.latency_s is not None:
                growth_s = change.latency_s - self._latency_of(link)
                self._latency_s[link] = change.latency_s
                self.slower_s[link] = self.slower_s.get(link, 0.0) + growth_s
            yield link, max(bandwidth_Bps - load_Bps, 0.0), growth_s

    def _latency_of(self, link: int) -> float:
        if link not in self._latency_s:
            edge = self._topology.ends(link)
            edges = self._topology.graph().edges
            self._latency_s[link] = edges[edge]["latency_s"] if edge in edges else 0.0
        return self._latency_s[link]
