"""A cluster as a drawing: hosts, switches, and what joins them."""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from dtlab.plots.palette import INK, PAPER, QUIET, rank_style
from dtlab.plots.picture import MARGIN_IN, Picture, page
from dtlab.topology import Topology
from dtlab.topology.base import check_topology
from dtlab.units import bytes_text, count_text, seconds_text

_DASHES = ("-", (0, (2.5, 1.2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))


def topology(cluster: Topology, *, title: str = "") -> Picture:
    """Ranks (numbered, in their colours) and switches (dark), joined by links.

    The faster the link, the thicker the line; the legend gives bandwidth and latency, one
    direction. Hosts stand at the bottom, each switch above what it joins; without switches, hosts
    stand in a circle. Clusters that know better say where each node stands: attribute `pos`, (x, y)
    in any unit. A link that would run over another node goes round it.
    """
    check_topology("cluster", cluster)
    graph = cluster.graph()
    places, links, thin = layout_of(graph), _links(graph), min(1.0, 16 / cluster.ranks)
    kinds = sorted({kind for _, _, kind in links}, reverse=True)
    heading = title or f"{cluster.name.split('(')[0].strip().capitalize()} cluster"
    note = count_text(cluster.ranks, "rank")
    if others := len(graph) - cluster.ranks:  # switches, CPUs, network cards
        note += f" · {count_text(others, 'other node')}"
    speeds = " · links: " + "; ".join(map(_speed, kinds)) if kinds else ""
    subtitle = note if len(kinds) > 1 else note + speeds  # or a legend
    with page(11, 5.2, heading, subtitle) as picture:
        rows = -(-len(kinds) // 3) if len(kinds) > 1 else 0  # of the legend
        foot = 0.15 + 0.45 * (rows > 0) + 0.3 * max(0, rows - 1)
        axes = picture.place(left=MARGIN_IN, right=MARGIN_IN, bottom=foot, top=1.0)
        for number, kind in enumerate(kinds):
            lines = [line_of(graph, a, b, places) for a, b, k in links if k == kind]
            axes.add_collection(LineCollection(
                lines, colors=QUIET, linewidths=max(1.5, 5.0 - 1.5 * number) * thin,
                linestyles=[_DASHES[number % 4]], zorder=1, label=_speed(kind)), autolim=False)
        draw_nodes(axes, graph, places)
        frame_nodes(axes, graph, places)
        if len(kinds) > 1:
            picture.legend(loc="lower left", bbox_to_anchor=(MARGIN_IN / 11, 0.02), ncols=3,
                           handlelength=3)
    picture.alt = f"{heading}: {note}{speeds}."
    return picture


def layout_of(graph: nx.DiGraph) -> dict[Any, tuple[float, float]]:
    """Hosts in a row at the bottom (y = 0; more than 16 in columns below), switches above, to 1."""
    if has_places(graph):
        return _scaled({node: data["pos"] for node, data in graph.nodes(data=True)})
    hosts = sorted(n for n in graph if isinstance(n, int))
    if len(hosts) == len(graph):
        turn = np.linspace(0, 2 * np.pi, len(hosts), endpoint=False)
        return {host: (0.5 + 0.5 * float(np.sin(a)), 0.5 + 0.5 * float(np.cos(a)))
                for host, a in zip(hosts, turn, strict=True)}
    depth = nx.multi_source_dijkstra_path_length(graph.reverse(), hosts, weight=lambda *_: 1)
    depth = {node: depth.get(node, 1) for node in graph}
    top = max(depth.values()) or 1
    deep = -(-len(hosts) // 16)
    columns = -(-len(hosts) // deep)
    places = {h: ((i // deep + 0.5) / columns, -0.17 * (i % deep)) for i, h in enumerate(hosts)}
    for level in range(1, top + 1):
        nodes = [n for n in graph if depth[n] == level]
        wish = {n: float(np.mean([places[m][0] for m in graph.predecessors(n) if m in places]
                                 or [0.5])) for n in nodes}
        nodes.sort(key=lambda n: (wish[n], str(n)))
        for i, node in enumerate(nodes):
            places[node] = ((i + 0.5) / len(nodes), level / top)
    return places


def frame_nodes(axes: Axes, graph: nx.DiGraph, places: dict[Any, tuple[float, float]]) -> None:
    """Set limits with room for nodes, and for links that go round others."""
    margin = 0.19 if has_places(graph) else 0.13
    axes.set_axis_off()
    axes.set_xlim(-0.06, 1.06)
    axes.set_ylim(min(y for _, y in places.values()) - margin, 1 + margin)


def line_of(graph: nx.DiGraph, a: Any, b: Any, places: dict[Any, tuple[float, float]]
            ) -> np.ndarray:
    """The points of a link; round other nodes only where the cluster says where they stand."""
    return line_between(a, b, places if has_places(graph) else {a: places[a], b: places[b]})


def has_places(graph: nx.DiGraph) -> bool:
    return all("pos" in data for _, data in graph.nodes(data=True))


def _scaled(places: dict[Any, tuple[float, float]]) -> dict[Any, tuple[float, float]]:
    """The same places, from 0.04 to 0.96 across and from 0 to 1 upwards."""
    points = np.array(list(places.values()), dtype=float)
    low, span = points.min(axis=0), np.ptp(points, axis=0)
    middle = span == 0  # all at one height, or one above the other
    points = np.where(middle, 0.5, (points - low) / np.where(middle, 1, span))
    return {node: (0.04 + 0.92 * float(x), float(y))
            for node, (x, y) in zip(places, points, strict=True)}


def line_between(a: Any, b: Any, places: dict[Any, tuple[float, float]]) -> np.ndarray:
    """The points of a link: straight, or a bow around the nodes that stand in between."""
    start, end = np.array(places[a]), np.array(places[b])
    others = np.array([place for node, place in places.items() if node not in (a, b)])
    along = end - start
    length = float(np.hypot(*along))
    if not len(others) or not length:
        return np.array([start, end])
    share = np.clip((others - start) @ along / length**2, 0, 1)
    gaps = np.hypot(*(others - start - share[:, None] * along).T)
    if gaps.min() > 0.02:
        return np.array([start, end])
    aside = np.array([-along[1], along[0]]) / length
    if (start + end - 1.0) @ aside < 0:  # outwards, away from the middle of the picture
        aside = -aside
    bend = (start + end) / 2 + aside * (0.1, 0.3)  # the picture is three times as wide as high
    t = np.linspace(0, 1, 24)[:, None]
    return np.asarray((1 - t) ** 2 * start + 2 * t * (1 - t) * bend + t**2 * end)


def _links(graph: nx.DiGraph) -> list[tuple[Any, Any, tuple[float, float]]]:
    """Each pair of neighbours once, with (bandwidth, latency) of one direction."""
    seen: dict[tuple[Any, Any], tuple[float, float]] = {}
    for a, b, data in graph.edges(data=True):
        pair = (a, b) if (str(a), str(b)) <= (str(b), str(a)) else (b, a)
        seen.setdefault(pair, (float(data["bandwidth_Bps"]), float(data["latency_s"])))
    return [(a, b, kind) for (a, b), kind in seen.items()]


def _speed(kind: tuple[float, float]) -> str:
    bandwidth, latency = kind
    speed = "∞" if np.isinf(bandwidth) else bytes_text(bandwidth)
    return f"{speed}/s, {seconds_text(latency)}"


def node_sizes(graph: nx.DiGraph, places: dict[Any, tuple[float, float]]) -> tuple[float, float]:
    """Choose font sizes, in points, of hosts' numbers and switches' names: as there is room."""
    columns = len({places[node][0] for node in graph if isinstance(node, int)})
    letters: dict[float, int] = {}  # at each height, with a gap of three between names
    for node in graph:
        if not isinstance(node, int):
            letters[places[node][1]] = letters.get(places[node][1], 0) + len(str(node)) + 3
    return (float(np.clip(10.4 * 72 / max(1, columns) * 0.3, 9, 17)),
            float(np.clip(10 * 72 / (0.62 * max(letters.values(), default=1)), 5, 13)))


def draw_nodes(axes: Axes, graph: nx.DiGraph, places: dict[Any, tuple[float, float]]) -> None:
    hosts = [node for node in graph if isinstance(node, int)]
    size, small = node_sizes(graph, places)
    styles = [rank_style(host) for host in hosts]
    across, up = np.array([places[host] for host in hosts]).T
    axes.scatter(across, up, s=(size * 2.1) ** 2, marker="s", zorder=2,
                 c=[style.color for style in styles], edgecolors=INK, linewidths=1.0)
    for host, style in zip(hosts, styles, strict=True):
        axes.text(*places[host], str(host), ha="center", va="center_baseline", size=size,
                  weight="bold", color=style.ink, zorder=3)
    for node in (node for node in graph if not isinstance(node, int)):
        axes.text(*places[node], str(node), ha="center", va="center", size=small, color=PAPER,
                  zorder=3, bbox={"boxstyle": "round,pad=0.5", "facecolor": INK, "edgecolor": INK})
