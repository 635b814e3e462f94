"""Links that are faster or slower than built, fail, come back, or carry others' traffic."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from dtlab.checks import check_amount, check_number, check_positive
from dtlab.errors import ConfigError
from dtlab.topology.base import Change, Node, Topology, check_link, check_pair, check_topology
from dtlab.topology.graphs import ShortestPaths, check_connected


def with_link(topology: Topology, a: Node, b: Node, *, bandwidth_Bps: float | None = None,
              latency_s: float | None = None, at_s: float = 0.0,
              both_ways: bool = True) -> Topology:
    """The same cluster, but the link from `a` to `b` (and back, with `both_ways`) has another
    bandwidth or latency, from virtual time `at_s` on. Of two changes at one time, the last one
    given counts.

    bandwidth_Bps: bytes per second, one direction; 0: the link has failed. Messages on their way
    over it wait until it works again (if it never does, that is a deadlock). Routes avoid links
    that have failed from the start (at_s = 0), and never change later on: switches take seconds to
    learn. latency_s: for messages that start from then on. None: stays as it is.

    Raises `ConfigError` if there is no such link, or if ranks can't reach each other without it.

    >>> from dtlab.topology import torus
    >>> with_link(torus(4, 4), 0, 1, bandwidth_Bps=0).path(0, 1)
    [0, 3, 2, 1]
    """
    check_topology("topology", topology)
    check_amount("at_s", at_s, " seconds")
    check_amount("latency_s", 0 if latency_s is None else latency_s)
    check_number("bandwidth_Bps", 1 if bandwidth_Bps is None else bandwidth_Bps)
    check_link(0, bandwidth_Bps or 1)
    links = _links(topology, [(a, b), (b, a)] if both_ways else [(a, b)])
    if at_s > 0:
        changes = [Change(at_s, link, bandwidth_Bps, latency_s) for link in links]
        return replace(topology, changes=(*topology.changes, *changes))
    for link in links:
        topology = _rebuilt(topology, link, bandwidth_Bps, latency_s)
    return topology


def with_traffic(topology: Topology, src: int, dst: int, rate_Bps: float, *, start_s: float = 0.0,
                 end_s: float = math.inf) -> Topology:
    """The same cluster, on which others send `rate_Bps` bytes per second from rank `src` to rank
    `dst`, from virtual time `start_s` to `end_s`.

    That traffic yields to no message: it takes its rate from each link of its route, and the
    messages of the simulation share the rest. If nothing is left, they wait. Raises `ConfigError`
    for ranks and numbers that make no sense.
    """
    check_topology("topology", topology)
    check_amount("start_s", start_s, " seconds")
    check_positive("rate_Bps", rate_Bps)
    check_number("end_s", end_s)
    if not end_s > start_s:
        raise ConfigError(f"end_s must be a time after start_s = {start_s}, not {end_s!r}")
    check_pair(src, dst, topology.ranks)
    changes = []
    for link in topology.route(src, dst)[1]:
        changes.append(Change(start_s, link, load_Bps=rate_Bps))
        if end_s < math.inf:
            changes.append(Change(end_s, link, load_Bps=-rate_Bps))
    return replace(topology, changes=(*topology.changes, *changes))


def _rebuilt(topology: Topology, changed: int, bandwidth_Bps: float | None,
             latency_s: float | None) -> Topology:
    """Return `topology` with link number `changed` as if it had been built so."""
    capacity_Bps = list(topology.capacity_Bps)
    graph, edge = topology.graph(), topology.ends(changed)
    slower_s = 0.0
    if latency_s is not None and edge in graph.edges:
        slower_s = latency_s - graph.edges[edge]["latency_s"]
        graph.edges[edge]["latency_s"] = float(latency_s)
    if bandwidth_Bps is not None:
        capacity_Bps[changed] = float(bandwidth_Bps)
        if not bandwidth_Bps:
            graph.remove_edges_from([edge])
            check_connected(graph)
        elif edge in graph.edges:
            graph.edges[edge]["bandwidth_Bps"] = float(bandwidth_Bps)
        else:
            raise ConfigError(f"the link from {edge[0]} to {edge[1]} has failed from the start; "
                              f"it can't come back at 0 s")
    number = {topology.ends(link): link for link in range(len(capacity_Bps))}
    detours = ShortestPaths(graph)
    failed = not capacity_Bps[changed]

    def route(src: int, dst: int) -> tuple[float, tuple[int, ...]]:
        total_s, links = topology.route(src, dst)
        if changed not in links:
            return total_s, links
        if not failed:
            return total_s + slower_s, links
        edges = list(pairwise(detours.path(src, dst)))
        return sum(graph.edges[e]["latency_s"] for e in edges), tuple(number[e] for e in edges)

    return replace(topology, capacity_Bps=tuple(capacity_Bps), route=route, graph=graph.copy)


def _links(topology: Topology, edges: list[tuple[Node, Node]]) -> list[int]:
    """The numbers of the links that join these nodes."""
    number = {topology.ends(link): link for link in range(len(topology.capacity_Bps))}
    for a, b in edges:
        if not all(isinstance(node, (int, str)) for node in (a, b)) or (a, b) not in number:
            raise ConfigError(f"there is no link from {a!r} to {b!r}; "
                              f"topology.graph().edges lists the links")
    return [number[edge] for edge in edges]
