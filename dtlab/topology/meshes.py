"""Direct networks: torus and dragonfly, where switches are neighbours of each other."""

from __future__ import annotations

import math
from itertools import combinations

import networkx as nx

from dtlab.checks import check_amount, check_each
from dtlab.topology.base import (
    OVERHEAD_S,
    Node,
    Topology,
    check_bandwidth,
    check_count,
    check_link,
    check_total,
)
from dtlab.topology.graphs import from_paths, join, pair_hash


def torus(x: int, y: int, z: int = 1, latency_s: float = 1e-6,
          bandwidth_Bps: float = 50e9, overhead_s: float = OVERHEAD_S) -> Topology:
    """A grid whose rows, columns (and pillars) are closed to rings.

    Picture: x rows of y ranks, z layers deep. Each rank has a link to either neighbour in its row,
    its column and its pillar; the last is the first one's neighbour. Rank (i, j, l) has the number
    (i·y + j)·z + l. A dimension of size 2 has one link between its two ranks, size 1 none.

    Messages go the shorter way round in the first dimension, then in the second, then in the third
    (dimension-ordered routing); if both ways are equally long, a hash of (src, dst) chooses. Ranks
    forward what is not for them without taking part. latency_s: of each link; bandwidth_Bps: of
    each link, bytes per second, one direction. Defaults: about those of TPU v4 (50 GB/s a link).
    overhead_s: see `Topology`.
    Source: Dally & Towles 2004, Principles and Practices of Interconnection Networks, §5 and §8.

    >>> torus(5, 5).path(0, 23)
    [0, 20, 24, 23]
    """
    check_each(check_count, x=x, y=y, z=z)
    sizes = x, y, z = int(x), int(y), int(z)
    check_total("ranks", *sizes)
    check_link(latency_s, bandwidth_Bps)
    strides = (y * z, z, 1)
    ranks = x * y * z
    graph = nx.DiGraph()
    for rank in range(ranks):
        layer = rank % z
        place = (rank // z % y + 0.3 * layer, -(rank // (y * z)) + 0.35 * layer)
        graph.add_node(rank, kind="host", host=rank, pos=place)

    def step(rank: int, dimension: int, by: int) -> int:
        """The rank `by` steps further along `dimension`."""
        size, stride = sizes[dimension], strides[dimension]
        at = rank // stride % size
        return rank + ((at + by) % size - at) * stride

    for rank in range(ranks):
        for dimension in range(3):
            neighbour = step(rank, dimension, 1)
            if neighbour != rank:
                join(graph, rank, neighbour, latency_s, bandwidth_Bps)

    def path(src: int, dst: int) -> list[Node]:
        nodes: list[Node] = [src]
        here, coin = src, pair_hash(src, dst)
        for dimension, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
            ahead = (dst // stride - src // stride) % size
            backwards = 2 * ahead > size or (2 * ahead == size and coin >> dimension & 1)
            for _ in range(size - ahead if backwards else ahead):
                here = step(here, dimension, -1 if backwards else 1)
                nodes.append(here)
        return nodes

    shape = f"{x} × {y}" + f" × {z}" * (z > 1)
    return from_paths(graph, f"torus({shape}, {bandwidth_Bps / 1e9:g} GB/s)", path,
                      overhead_s)


def dragonfly(groups: int, routers: int, hosts: int, latency_s: float = 1e-6,
              bandwidth_Bps: float = 25e9, global_latency_s: float = 1.5e-6,
              global_Bps: float | None = None, overhead_s: float = OVERHEAD_S) -> Topology:
    """Groups of routers, all joined within a group, and each group joined to each other group.

    Picture: `groups` cliques of `routers` routers with `hosts` hosts each. Between any two groups
    runs one long (optical) link; the long links of a group are dealt out to its routers in turn.

    Messages take the minimal route: to the router that has the long link to the other group,
    across, and on to the destination's router; so three links between routers at most, and one
    long link that all messages between two groups share. (Adaptive routing through a third group
    is not modelled.) latency_s, bandwidth_Bps: of links of hosts and within a group;
    global_latency_s, global_Bps: of long links (default: bandwidth_Bps); bytes per second, one
    direction. Defaults: about those of Slingshot, 200 Gb/s. overhead_s: see `Topology`.
    Source: Kim, Dally, Scott, Abts 2008, Technology-Driven, Highly-Scalable Dragonfly Topology.

    >>> dragonfly(3, 2, 2).path(0, 11)
    [0, 'router0', 'router1', 'router4', 'router5', 11]
    """
    check_each(check_count, groups=groups, routers=routers, hosts=hosts)
    check_total("ranks", groups, routers, hosts)
    check_total("long links", groups, groups)
    check_link(latency_s, bandwidth_Bps)
    check_amount("global_latency_s", global_latency_s)
    global_Bps = bandwidth_Bps if global_Bps is None else global_Bps
    check_bandwidth("global_Bps", global_Bps)
    graph = nx.DiGraph()
    ranks = groups * routers * hosts
    for rank in range(ranks):
        graph.add_node(rank, kind="host", host=rank, pos=_on_circle((rank + 0.5) / ranks, 1.0))
    for router in range(groups * routers):
        place = _on_circle((router + 0.5) / (groups * routers), 0.62)
        graph.add_node(f"router{router}", kind="switch", pos=place)
        for rank in range(router * hosts, (router + 1) * hosts):
            join(graph, rank, f"router{router}", latency_s, bandwidth_Bps)

    def gateway(group: int, other: int) -> int:
        """The router of `group` with the long link to the group `other`."""
        return group * routers + (other - group - 1) % groups % routers

    for group in range(groups):
        for a, b in combinations(range(group * routers, (group + 1) * routers), 2):
            join(graph, f"router{a}", f"router{b}", latency_s, bandwidth_Bps)
    for a, b in combinations(range(groups), 2):
        join(graph, f"router{gateway(a, b)}", f"router{gateway(b, a)}", global_latency_s,
             global_Bps)

    def path(src: int, dst: int) -> list[Node]:
        if src == dst:
            return [src]
        first, last = src // hosts, dst // hosts
        from_group, to_group = first // routers, last // routers
        stops = [first, last]
        if from_group != to_group:
            stops[1:1] = [gateway(from_group, to_group), gateway(to_group, from_group)]
        crossed = dict.fromkeys(f"router{router}" for router in stops)  # each once, in order
        return [src, *crossed, dst]

    name = (f"dragonfly({groups} groups × {routers} routers × {hosts} hosts, "
            f"{bandwidth_Bps / 1e9:g} GB/s)")
    return from_paths(graph, name, path, overhead_s)


def _on_circle(turn: float, radius: float) -> tuple[float, float]:
    """Return where a node stands in a picture: `turn` of the way round, clockwise from the top."""
    return radius * math.sin(2 * math.pi * turn), radius * math.cos(2 * math.pi * turn)
