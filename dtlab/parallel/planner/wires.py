"""What the groups of one mesh axis get from a topology."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import NamedTuple

from dtlab.topology import Topology


class Wire(NamedTuple):
    """What a message between neighbours of a group meets: α seconds, and β seconds a byte."""

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
    `exchange=True` to all others of its group, a part of its message to each.

    A link that k flows cross gives each a k-th; the slowest flow is the group's. So an axis in the
    wrong place shows: eight groups that all cross one network card get an eighth of it. A group
    with k ranks on each host makes k rings of a k-th of the bytes each, one a rail. rails=False:
    one ring, which ZeRO 3 of 2021 seems to have had (Narayanan et al. 2021, table 2).
    """

    @cache
    def wire(size: int, stride: int, exchange: bool = False) -> Wire:
        latency_s, flows = topology.overhead_s, defaultdict[int, float](float)
        for group in _groups(topology.ranks, size, stride):
            for src, dst, share in _flows(group, topology.host_of, rails, exchange):
                route_s, links = topology.route(src, dst)
                latency_s = max(latency_s, route_s)
                for link in links:
                    flows[link] += share
        return Wire(latency_s, max((n / topology.capacity_Bps[link] for link, n in flows.items()),
                                   default=0.0))

    return wire


def _groups(ranks: int, size: int, stride: int) -> Iterator[list[int]]:
    for first in range(ranks if size > 1 else 0):
        if first // stride % size == 0:
            yield [first + place * stride for place in range(size)]


def _flows(group: list[int], host_of: Callable[[int], int], rails: bool, exchange: bool
           ) -> Iterator[tuple[int, int, float]]:
    """(from, to, share of the message)."""
    if exchange:
        yield from ((src, dst, 1 / (len(group) - 1)) for src in group for dst in group
                    if src != dst)
        return
    rings = rings_of(group, host_of, rails)
    for ring in rings:
        yield from ((src, dst, 1 / len(rings))
                    for src, dst in zip(ring, [*ring[1:], ring[0]], strict=True))


def wire_of(mesh: dict[str, int], names: str | tuple[str, ...], wire: Wires,
            exchange: bool = False) -> Wire:
    """Of the groups along the axes `names` of a mesh together. Where they aren't neighbours in it,
    the slowest of each one's."""
    return _wire_of(tuple(mesh.items()), (names,) if isinstance(names, str) else names, wire,
                    exchange)


@lru_cache(1024)  # a plan asks ten times for each of thousands of layouts of one mesh
def _wire_of(axes: tuple[tuple[str, int], ...], names: tuple[str, ...], wire: Wires,
             exchange: bool) -> Wire:
    stride, found = 1, []
    for axis, size in reversed(axes):
        if size > 1 and axis in names:
            found.append((size, stride))
        stride *= size
    if not found:
        return Wire(0.0, 0.0)
    size, stride = math.prod(size for size, _ in found), found[0][1]
    if found[-1][0] * found[-1][1] == size * stride:
        return wire(size, stride, exchange)
    return max((wire(*each, exchange) for each in found), key=lambda w: (w.beta, w.alpha))
