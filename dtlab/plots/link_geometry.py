"""The places of the nodes and links of a cluster at work in its picture."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import networkx as nx
import numpy as np

from dtlab.plots.network import has_places, layout_of, line_of
from dtlab.recording.link_history import Link, LinkHistory
from dtlab.topology import Node

Box = tuple[float, float, float, float]  # left, bottom, right, top, in inches
WIDE_IN, HIGH_IN = 10.4, 3.45  # room for the cluster


@lru_cache(maxsize=16)
def geometry_of(history: LinkHistory) -> Geometry:
    """Work the geometry out, once for all frames of a run."""
    return Geometry(history.graph, history.links)


class Geometry:
    """Places of nodes and lanes, in inches from the lower left corner of their axes: the same in
    all frames. A lane is one direction of a link, on its right-hand side."""

    def __init__(self, graph: nx.DiGraph, links: Sequence[Link]):
        unit = layout_of(graph)
        placed = has_places(graph)
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
                line = line_of(graph, a, b, unit)
                self.lanes[number] = _aside((line - corner) * scale, 0.055 * self.thin)


def _box(node: Node, x: float, y: float) -> Box:
    """Return roughly the box in which a node is drawn."""
    half = 0.26 if isinstance(node, int) else 0.12 + 0.05 * len(node)
    return x - half, y - 0.26, x + half, y + 0.26


def _aside(line: np.ndarray, gap_in: float) -> np.ndarray:
    """Return `line`, shifted to the right of the way it goes."""
    along = line[-1] - line[0]
    length = float(np.hypot(*along)) or 1.0
    return np.asarray(line + gap_in * np.array([along[1], -along[0]]) / length)
