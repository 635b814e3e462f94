"""A cluster as a drawing: hosts, switches, and what joins them."""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from dtlab.plots.palette import INK, PAPER, QUIET, rank_style
from dtlab.plots.picture import MARGIN_IN, Picture, new_picture, place_axes, styled, write_title
from dtlab.plots.units import bytes_text, count_text, seconds_text
from dtlab.topology import Topology

_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))


def topology(cluster: Topology, *, title: str = "", dpi: float = 100) -> Picture:
    """Ranks (numbered, in their colours) and switches (dark), joined by links.

    The faster the link, the thicker the line; the legend gives bandwidth and latency, one
    direction. Hosts stand at the bottom, each switch above what it joins; without switches, hosts
    stand in a circle.
    """
    graph = cluster.graph()
    places = layout_of(graph)
    links = _links(graph)
    kinds = sorted({kind for _, _, kind in links}, reverse=True)
    thin = min(1.0, 16 / cluster.ranks)
    heading = title or f"{cluster.name.split('(')[0].strip().capitalize()} cluster"
    told = (f"{count_text(cluster.ranks, 'rank')} · "
            f"{count_text(_switches(graph), 'switch', 'switches')} · links: "
            + ", ".join(_speed(kind) for kind in kinds[:3]))
    with styled():
        picture = new_picture(11, 5.2, dpi)
        write_title(picture, heading, told)
        foot = 0.6 if len(kinds) > 1 else 0.15
        axes = place_axes(picture, left=MARGIN_IN, right=MARGIN_IN, bottom=foot, top=1.0)
        axes.set_axis_off()
        axes.set_xlim(-0.05, 1.05)
        axes.set_ylim(min(y for _, y in places.values()) - 0.12, 1.12)
        for number, kind in enumerate(kinds):
            lines = [[places[a], places[b]] for a, b, k in links if k == kind]
            axes.add_collection(LineCollection(
                lines, colors=QUIET, linewidths=max(1.5, 5.0 - 1.5 * number) * thin,
                linestyles=[_DASHES[number % 4]], zorder=1, label=_speed(kind),
            ), autolim=False)
        _draw_nodes(axes, graph, places)
        if len(kinds) > 1:
            picture.legend(loc="lower left", bbox_to_anchor=(MARGIN_IN / 11, 0.02), ncols=3,
                           handlelength=3)
    picture.alt = f"{heading}: {told}."
    return picture


def layout_of(graph: nx.DiGraph) -> dict[Any, tuple[float, float]]:
    """Hosts in a row at the bottom (y = 0; more than 16 in columns below), switches above, to 1."""
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


def _switches(graph: nx.DiGraph) -> int:
    return sum(not isinstance(node, int) for node in graph)


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


def _draw_nodes(axes: Axes, graph: nx.DiGraph, places: dict[Any, tuple[float, float]]) -> None:
    hosts = [node for node in graph if isinstance(node, int)]
    columns = len({places[host][0] for host in hosts})
    size = float(np.clip(10.4 * 72 / max(1, columns) * 0.3, 9, 17))
    styles = [rank_style(host) for host in hosts]
    across, up = np.array([places[host] for host in hosts]).T
    axes.scatter(
        across, up, s=(size * 2.1) ** 2, marker="s", zorder=2,
        c=[style.color for style in styles], edgecolors=INK, linewidths=1.0,
    )
    for host, style in zip(hosts, styles, strict=True):
        axes.text(*places[host], str(host), ha="center", va="center_baseline", size=size,
                  weight="bold", color=style.ink, zorder=3)
    for node in set(graph) - set(hosts):
        axes.text(*places[node], str(node), ha="center", va="center", size=13, color=PAPER,
                  zorder=3, bbox={"boxstyle": "round,pad=0.5", "facecolor": INK, "edgecolor": INK})
