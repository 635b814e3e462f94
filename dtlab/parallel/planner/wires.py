"""The wires that a topology gives the groups of one mesh axis."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from itertools import pairwise, permutations, starmap
from statistics import fmean
from typing import NamedTuple

from dtlab.topology import Topology


class Wire(NamedTuple):
    """The wire between neighbours of a group: α seconds a message, and β seconds a byte."""

    alpha: float
    beta: float

    def ring_s(self, ranks: int, nbytes: float) -> float:
        """A ring's reduce-scatter or all-gather of `nbytes`, of which an all-reduce takes two; or
        an all-to-all in which each rank sends `nbytes`, its own part among them."""
        return (ranks - 1) * (self.alpha + nbytes / ranks * self.beta)


Wires = Callable[..., Wire]


def rings_of(group: list[int], host_of: Callable[[int], int], rails: bool = True
             ) -> list[list[int]]:
    """The orders in which a group sends: with k ranks on each of several hosts, k rings, each of
    which leaves a host through another rank's card; otherwise one, in the order of ranks."""
    hosts: dict[int, list[int]] = {}
    for rank in group:
        hosts.setdefault(host_of(rank), []).append(rank)
    here = [*hosts.values()]
    number = min(map(len, here)) if rails and len(here) > 1 else 1
    return [[rank for ranks in here for rank in (*ranks[ring:], *ranks[:ring])]
            for ring in range(number)]


def wires(topology: Topology, rails: bool = True) -> Wires:
    """(size, stride) → what the groups of a mesh axis get, whose `size` ranks are `stride` apart,
    if all ranks of all groups send at once: each to the next one of its ring, or with
    `exchange=True` to all others of its group, a part of its message to each. Of several axes
    together: (size, stride, size, stride, …), the innermost first.

    A link that k flows cross gives each a k-th; the slowest flow is the group's. So an axis in the
    wrong place shows: eight groups that all cross one network card get an eighth of it. A group
    with k ranks on each host makes k rings of a k-th of the bytes each, one a rail. rails=False:
    one ring, which ZeRO 3 of 2021 seems to have had (Narayanan et al. 2021, table 2).
    """
    ring_route = cache(topology.route)  # groups of other sizes ask the same

    @cache
    def wire(*axes: int, exchange: bool = False) -> Wire:
        latency_s, flows = topology.overhead_s, defaultdict[int, float](float)
        route = topology.route if exchange else ring_route  # all pairs would take much memory
        for group in _groups(topology.ranks, [*zip(axes[::2], axes[1::2], strict=True)]):
            share, pairs = _sends(group, topology.host_of, rails, exchange)
            for route_s, links in starmap(route, pairs):
                latency_s = max(latency_s, route_s)
                for link in links:
                    flows[link] += share
        return Wire(latency_s, max((n / topology.capacity_Bps[link] for link, n in flows.items()),
                                   default=0.0))

    return wire


def _groups(ranks: int, axes: list[tuple[int, int]]) -> Iterator[list[int]]:
    """Yield the groups of ranks along axes of these (size, stride), the innermost first."""
    group = [0]
    for size, stride in reversed(axes):
        group = [rank + place * stride for rank in group for place in range(size)]
    for first in range(ranks if len(group) > 1 else 0):
        if all(first // stride % size == 0 for size, stride in axes):
            yield [first + rank for rank in group]


def _sends(group: list[int], host_of: Callable[[int], int], rails: bool, exchange: bool
           ) -> tuple[float, Iterable[tuple[int, int]]]:
    """The share of a message that goes from one rank to another, and who sends to whom."""
    if exchange:
        return 1 / (len(group) - 1), permutations(group, 2)
    rings = rings_of(group, host_of, rails)
    return 1 / len(rings), [pair for ring in rings for pair in pairwise([*ring, ring[0]])]


class Hop(NamedTuple):
    """The way of a pipeline's messages from one stage to the next, on average over the stages: α
    seconds a message, and β seconds a byte. forward, both: seconds a byte on the link that most
    messages of a micro-batch cross, forward, or forward and backward."""

    alpha: float
    beta: float
    forward: float
    both: float


def hop_of(topology: Topology, mesh: dict[str, int], ring: bool) -> Hop:
    """The hop of a mesh's pipelines, if all send at once. ring: from the last rank to the first,
    too, as stages in several chunks do."""
    if mesh.get("pp", 1) == 1:
        return Hop(0.0, 0.0, 0.0, 0.0)
    inner = [*mesh.values()][[*mesh].index("pp") + 1 :]
    return _hop(topology, mesh["pp"], math.prod(inner), ring)


@lru_cache(1024)
def _hop(topology: Topology, ranks: int, stride: int, ring: bool) -> Hop:
    groups = [[*pairwise([*group, *group[: int(ring)]])]
              for group in _groups(topology.ranks, [(ranks, stride)])]
    forward = Counter(link for hops in groups for a, b in hops for link in topology.route(a, b)[1])
    backward = Counter(link for hops in groups for a, b in hops for link in topology.route(b, a)[1])

    def busiest(crossed: dict[int, int]) -> float:
        return max(n / topology.capacity_Bps[link] for link, n in crossed.items())

    def beta(a: int, b: int) -> float:
        return busiest({link: forward[link] for link in topology.route(a, b)[1]})

    slowest = max(groups, key=lambda hops: sum(starmap(beta, hops)))
    return Hop(fmean(max(topology.overhead_s, topology.route(a, b)[0]) for a, b in slowest),
               fmean(starmap(beta, slowest)), busiest(forward), busiest(forward + backward))


def wire_of(mesh: dict[str, int], names: str | tuple[str, ...], wire: Wires,
            exchange: bool = False) -> Wire:
    """Return the wire of the groups along the axes `names` of a mesh together."""
    return _wire_of(tuple(mesh.items()), (names,) if isinstance(names, str) else names, wire,
                    exchange)


@lru_cache(1024)  # a plan asks ten times for each of thousands of layouts of one mesh
def _wire_of(mesh: tuple[tuple[str, int], ...], names: tuple[str, ...], wire: Wires,
             exchange: bool) -> Wire:
    stride, axes = 1, list[int]()
    for name, size in reversed(mesh):
        if size > 1 and name in names:
            if axes and axes[-2] * axes[-1] == stride:  # the next ones of those before
                axes[-2] *= size
            else:
                axes += [size, stride]
        stride *= size
    return wire(*axes, exchange=exchange) if axes else Wire(0.0, 0.0)
