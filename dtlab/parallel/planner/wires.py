"""What the groups of one mesh axis get from a topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from dtlab.topology import Topology


class Wire(NamedTuple):
    """What a message between neighbours of a group meets: α seconds, and β seconds a byte."""

    alpha: float
    beta: float

    def ring_s(self, ranks: int, nbytes: float) -> float:
        """A ring's reduce-scatter or all-gather of `nbytes`; an all-reduce takes two."""
        return (ranks - 1) * (self.alpha + nbytes / ranks * self.beta)


Wires = Callable[[int, int], Wire]


def wires(topology: Topology) -> Wires:
    """(size, stride) → what the groups of a mesh axis get, whose `size` ranks are `stride` apart,
    if every rank of every group sends to the next one of its ring at once.

    A link that k of these flows cross gives each a k-th; the slowest flow is the ring's. So an axis
    in the wrong place shows: eight groups that all cross one network card get an eighth of it.

    One ring a group, in the order of its ranks, leaves a host through one rank's card. NCCL makes
    more rings, through all cards; but what ZeRO 3 reached on such hosts (Narayanan et al. 2021,
    table 2) is near one ring, and far below eight.
    """

    @cache
    def wire(size: int, stride: int) -> Wire:
        latency_s, flows = topology.overhead_s, Counter[int]()
        for rank in range(topology.ranks if size > 1 else 0):
            place = rank // stride % size
            route_s, links = topology.route(rank, rank + ((place + 1) % size - place) * stride)
            latency_s = max(latency_s, route_s)
            flows.update(links)
        return Wire(latency_s, max((n / topology.capacity_Bps[link] for link, n in flows.items()),
                                   default=0.0))

    return wire


def wire_of(mesh: dict[str, int], name: str, wire: Wires) -> Wire:
    """Of the axis `name` of a mesh, if it has one."""
    stride = 1
    for axis, size in reversed(mesh.items()):
        if axis == name:
            return wire(size, stride)
        stride *= size
    return Wire(0.0, 0.0)
