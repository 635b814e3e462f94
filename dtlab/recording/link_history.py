"""A simulated run as a history of its links: what each carries from change to change."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from dtlab.simulator import Stretch, replay
from dtlab.topology import Node, Topology
from dtlab.trace import Trace

__all__ = ["Link", "LinkHistory", "Stretch"]
Link = tuple[Node, Node]


class LinkHistory:
    """A simulated run as stretches between changes. Raises `ConfigError` as `replay` does."""

    def __init__(self, cluster: Topology, trace: Trace):
        self.cluster, self.stretches = cluster, replay(cluster, trace)
        self.links = [cluster.ends(number) for number in range(len(cluster.capacity_Bps))]
        self.graph = cluster.graph()

    def at(self, at_s: float) -> Stretch | None:
        """The stretch that is on at `at_s`; None: before the start or after the end."""
        return next((s for s in self.stretches if s.start_s <= at_s < s.end_s), None)

    @property
    def end_s(self) -> float:
        """The time when the last message has arrived."""
        return self.stretches[-1].end_s if self.stretches else 0.0

    @cached_property
    def busiest(self) -> list[tuple[str, list[float]]]:
        """(name, load in each stretch) of the links with most to do, the busiest first. Links that
        always carry the same share are named once."""
        loads: dict[int, list[float]] = {}
        for number, stretch in enumerate(self.stretches):
            for link, load in stretch.loads.items():
                loads.setdefault(link, [0.0] * len(self.stretches))[number] = load
        spans = [s.end_s - s.start_s for s in self.stretches]
        alike: dict[tuple[float, ...], list[int]] = {}
        for link in loads:  # in the order in which flows cross them
            alike.setdefault(tuple(round(load, 6) for load in loads[link]), []).append(link)
        order = sorted(alike, key=lambda series: -float(np.dot(series, spans)))
        names = {series: self.name(self.links[links[0]], len(links) - 1)
                 for series, links in alike.items()}
        return [(names[series], list(series)) for series in order]

    @staticmethod
    def name(link: Link, others: int = 0) -> str:
        """"rack0 → spine (and 3 alike)": a link, and how many others do the same all the time."""
        return f"{link[0]} → {link[1]}" + (f" (and {others} alike)" if others else "")
