"""From a graph to a topology: links get numbers, pairs of ranks get routes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import isclose

import networkx as nx

from dtlab.checks import check_name, check_whole
from dtlab.errors import ConfigError
from dtlab.topology.base import OVERHEAD_S, Node, Topology, check_link

Path = Callable[[int, int], list[Node]]  # (src, dst) → the nodes on the way, both included
RANK_KINDS = ("host", "gpu")


def from_graph(graph: nx.DiGraph, name: str, overhead_s: float = OVERHEAD_S) -> Topology:
    """A cluster of any shape.

    Nodes 0, 1, …, p−1 are the ranks; attribute `kind` "host" (the default) or "gpu"; `host`, the
    number of the host it belongs to (default: its own). All other nodes have names; `kind` "switch"
    (the default), "cpu", "nic", …. An edge is a link in one direction, with `latency_s` (seconds)
    and `bandwidth_Bps` (bytes per second). overhead_s: see `Topology`.

    Messages take shortest paths: fewest links, among those the least latency; among equals, a hash
    of (src, dst) chooses, the same in every run, as switches do (equal-cost multi-path, RFC 2992).
    Routes to a rank are searched for when first needed.

    Raises `ConfigError` if ranks are missing, links make no sense, or a rank can't reach another.
    """
    if not isinstance(graph, nx.DiGraph) or graph.is_multigraph():
        raise ConfigError("graph must be a networkx.DiGraph: one edge for each direction of a link")
    check_name("a topology's name", name)
    graph = graph.copy()
    _check_nodes(graph)
    for a, b, data in graph.edges(data=True):
        _check_edge(a, b, data)
    check_connected(graph)
    return from_paths(graph, name, ShortestPaths(graph).path, overhead_s)


def from_paths(graph: nx.DiGraph, name: str, path: Path,
               overhead_s: float = OVERHEAD_S) -> Topology:
    """A cluster whose builder knows its paths, so that no search is needed.

    graph: as for `from_graph`, not checked. path: (src, dst) → the nodes on the way.
    """
    ends = tuple(graph.edges)
    number = {edge: link for link, edge in enumerate(ends)}
    latency_s = [data["latency_s"] for _, _, data in graph.edges(data=True)]
    capacity_Bps = tuple(float(data["bandwidth_Bps"]) for _, _, data in graph.edges(data=True))
    ranks = sum(isinstance(node, int) for node in graph)
    host = [graph.nodes[rank].get("host", rank) for rank in range(ranks)]

    def route(src: int, dst: int) -> tuple[float, tuple[int, ...]]:
        links = tuple(map(number.__getitem__, pairwise(path(src, dst))))
        return sum(map(latency_s.__getitem__, links)), links

    return Topology(name, ranks, capacity_Bps, route, graph.copy, ends.__getitem__,
                    host.__getitem__, overhead_s=overhead_s)


def join(graph: nx.DiGraph, a: Node, b: Node, latency_s: float, bandwidth_Bps: float) -> None:
    """Add a full-duplex link to `graph`: an edge in each direction, of the full bandwidth each."""
    check_link(latency_s, bandwidth_Bps)
    for edge in ((a, b), (b, a)):
        graph.add_edge(*edge, latency_s=float(latency_s), bandwidth_Bps=float(bandwidth_Bps))


def pair_hash(src: int, dst: int) -> int:
    """64 bits that look random, the same in every run (Python's own `hash` promises no such thing).

    Source: the finalizer of SplitMix64; Steele, Lea, Flood 2014.
    """
    mask = (1 << 64) - 1
    x = ((src << 32) + dst + 1) * 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


class ShortestPaths:
    """Shortest paths by (links, latency), found one destination at a time and remembered."""

    def __init__(self, graph: nx.DiGraph):
        self._graph = graph
        self._next: dict[Node, dict[Node, list[Node]]] = {}  # destination → node → next nodes

    def path(self, src: Node, dst: Node, flow: int | None = None) -> list[Node]:
        """The nodes from `src` to `dst`, both included; equals are told apart by `flow`, which for
        ranks is a hash of the two. Raises `ConfigError` if there is no way."""
        if dst not in self._next:
            self._next[dst] = self._towards(dst)
        following = self._next[dst]
        if src not in following:
            raise ConfigError(f"there is no way from {_called(src)} to {_called(dst)}")
        if flow is None:
            flow = pair_hash(int(src), int(dst))
        nodes = [src]
        while nodes[-1] != dst:
            choices = following[nodes[-1]]
            flow, choice = divmod(flow, len(choices))  # fresh digits for the next switch
            nodes.append(choices[choice])
        return nodes

    def _towards(self, dst: Node) -> dict[Node, list[Node]]:
        """Return for each node that can reach `dst` its neighbours on the shortest paths.

        Breadth first, backwards: when a node's turn comes, all nodes one link nearer to `dst` know
        their latencies.
        """
        predecessors = self._graph.pred
        latency_s: dict[Node, float] = {dst: 0.0}
        following: dict[Node, list[Node]] = {dst: []}
        ring: list[Node] = [dst]  # all nodes at one distance
        while ring:
            farther: dict[Node, float] = {}
            for near in ring:
                for far, link in predecessors[near].items():
                    if far in latency_s:
                        continue
                    total_s = link["latency_s"] + latency_s[near]
                    best_s = farther.get(far)
                    if best_s is not None and isclose(total_s, best_s, rel_tol=1e-9):
                        following[far].append(near)
                    elif best_s is None or total_s < best_s:
                        farther[far], following[far] = total_s, [near]
            latency_s.update(farther)
            ring = list(farther)
        return following


def _check_nodes(graph: nx.DiGraph) -> None:
    ranks = set()
    for node, data in graph.nodes(data=True):
        kind = data.get("kind")
        if isinstance(node, int):
            ranks.add(node)
            check_whole(f"the host of rank {node}", data.get("host", node), 0)
            if kind is not None and kind not in RANK_KINDS:
                raise ConfigError(f"node {node} is a {kind}, so it needs a name: numbers are ranks")
        elif not isinstance(node, str):
            raise ConfigError(f"node {node!r} must be a rank (a number) or have a name (a string)")
        elif node.lstrip("-").isdecimal():
            raise ConfigError(f"node {node!r} is a string; a rank is a number, all else has a name")
        elif kind in RANK_KINDS:
            raise ConfigError(f"node {node!r} is a {kind}, so it must be a rank: 0, 1, 2, …")
    if not ranks:
        raise ConfigError("a topology needs a rank: the nodes 0, 1, 2, … are the ranks")
    if missing := set(range(len(ranks))) - ranks:
        raise ConfigError(f"ranks are numbered from 0 without gaps: there is rank {max(ranks)}, "
                          f"but no rank {min(missing)}")


def _check_edge(a: Node, b: Node, data: dict[str, float]) -> None:
    here = f"the link from {_called(a)} to {_called(b)}"
    if a == b:
        raise ConfigError(f"{here} leads back to where it starts; leave it out")
    for key in ("latency_s", "bandwidth_Bps"):
        if key not in data:
            raise ConfigError(f"{here} has no {key}")
    try:
        check_link(data["latency_s"], data["bandwidth_Bps"])
    except ConfigError as error:
        raise ConfigError(f"{here}: {error}") from None


def check_connected(graph: nx.DiGraph) -> None:
    """Raise `ConfigError` unless every rank can reach every other: rank 0 must reach all, and all
    must reach rank 0."""
    ranks = {node for node in graph if isinstance(node, int)}
    if lost := ranks - {0} - nx.descendants(graph, 0):
        raise ConfigError(f"there is no way from rank 0 to rank {min(lost)}; add a link")
    if lost := ranks - {0} - nx.ancestors(graph, 0):
        raise ConfigError(f"there is no way from rank {min(lost)} to rank 0; add a link (a link "
                          f"leads one way: its other direction is an edge of its own)")


def _called(node: Node) -> str:
    return f"rank {node}" if isinstance(node, int) else repr(node)
