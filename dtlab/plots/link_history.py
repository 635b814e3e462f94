"""A simulated run as a history of its links: what each carries from change to change, and where it
stands in the picture."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import networkx as nx
import numpy as np

from dtlab.plots.network import layout_of, line_between
from dtlab.simulator import Stretch, replay
from dtlab.topology import Node, Topology
from dtlab.trace import Trace

Link = tuple[Node, Node]
Box = tuple[float, float, float, float]  # left, bottom, right, top, in inches
WIDE_IN, HIGH_IN = 10.4, 3.45  # room for the cluster


class LinkHistory:
    """A simulated run as stretches between changes, and what it takes to draw them.

    Raises `ConfigError` as `replay` does.
    """

    def __init__(self, cluster: Topology, trace: Trace):
        self.cluster, self.stretches = cluster, replay(cluster, trace)
        self.links = [cluster.ends(number) for number in range(len(cluster.capacity_Bps))]
        self.graph = cluster.graph()
        self.geometry = Geometry(self.graph, self.links)

    def at(self, at_s: float) -> Stretch | None:
        """The stretch that is on at `at_s`; None: before the start or after the end."""
        return next((s for s in self.stretches if s.start_s <= at_s < s.end_s), None)

    @property
    def end_s(self) -> float:
        """When the last message has arrived."""
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
        names = {series: link_name(self.links[links[0]], len(links) - 1)
                 for series, links in alike.items()}
        return [(names[series], list(series)) for series in order]


def link_name(link: Link, others: int = 0) -> str:
    """"rack0 → spine (and 3 alike)": a link, and how many others do the same all the time."""
    return f"{link[0]} → {link[1]}" + (f" (and {others} alike)" if others else "")


class Geometry:
    """Where nodes and lanes are, in inches from the lower left corner of their axes: the same in
    all frames. A lane is one direction of a link, on its right-hand side."""

    def __init__(self, graph: nx.DiGraph, links: Sequence[Link]):
        unit = layout_of(graph)
        placed = all("pos" in data for _, data in graph.nodes(data=True))
        aside, above = (0.06, 0.19) if placed else (0.0, 0.13)  # room for bows round the others
        low, high = min(y for _, y in unit.values()) - above, 1 + above
        corner = np.array([-aside, low])
        scale = np.array([WIDE_IN / (1 + 2 * aside), HIGH_IN / (high - low)])
        self.thin = min(1.0, 60 / len(links)) ** 0.5 if links else 1.0
        self.places = {node: tuple((place - corner) * scale) for node, place in unit.items()}
        self.boxes = [_box(node, *place) for node, place in self.places.items()]
        self.lanes = {}
        for number, (a, b) in enumerate(links):
            if graph.has_edge(a, b):  # else it has failed from the start
                line = line_between(a, b, unit if placed else {a: unit[a], b: unit[b]})
                self.lanes[number] = _aside((line - corner) * scale, 0.055 * self.thin)


def _box(node: Node, x: float, y: float) -> Box:
    """About where a node is drawn."""
    half = 0.26 if isinstance(node, int) else 0.12 + 0.05 * len(node)
    return x - half, y - 0.26, x + half, y + 0.26


def _aside(line: np.ndarray, gap_in: float) -> np.ndarray:
    """`line`, shifted to the right of the way it goes."""
    along = line[-1] - line[0]
    length = float(np.hypot(*along)) or 1.0
    return np.asarray(line + gap_in * np.array([along[1], -along[0]]) / length)
