"""Rings that don't slow each other: Hamiltonian cycles that share no wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import isinf

import networkx as nx

from dtlab.checks import check_whole
from dtlab.errors import ConfigError
from dtlab.topology.base import Topology, check_bandwidth, check_count, check_topology

Wires = dict[int, dict[int, int]]  # rank → neighbour → wires to it that are free
MOST_RINGS = 100  # the search goes one call deeper for each
STEPS = 200_000  # of the search, by default: about a second


def edge_disjoint_cycles(topology: Topology, count: int, *, wire_Bps: float | None = None,
                         steps: int = STEPS) -> list[list[int]]:
    """Find `count` rings over all ranks that can carry messages together, each at full speed.

    Each ring lists every rank once, beginning with 0, and closes: from each to the next, and from
    the last to the first, leads a direct link. A link is made of wires, and each ring takes one of
    them, in one direction; so a link of twice `wire_Bps` serves two rings, and a ring and its
    reverse never meet. wire_Bps: bytes per second of one wire, one direction (default: what the
    slowest direct link between two ranks has).

    How: backtracking, thick links first. Whether such cycles exist is a hard question in general
    (NP-complete for one), so the search ends after `steps` steps. Raises `ConfigError` if there are
    no such cycles, if it ended before it knew, or if `count` is above 100.

    >>> from dtlab.topology import torus
    >>> edge_disjoint_cycles(torus(1, 4), 2)
    [[0, 1, 2, 3], [0, 3, 2, 1]]
    """
    check_topology("topology", topology)
    check_whole("count", count, most=MOST_RINGS)
    check_count("steps", steps)
    wires = wires_of(topology, wire_Bps)
    _check_possible(topology, wires, count)
    search = Search(wires, steps)
    try:
        cycles = search.cycles(count)
    except _OutOfSteps:
        raise ConfigError(f"{topology.name}: found no {_rings(count)} within {steps:,} steps of "
                          f"search, nor that there are none; allow more steps, or ask for "
                          f"fewer rings") from None
    if cycles is None:
        raise ConfigError(f"{topology.name}: its direct links don't hold {_rings(count)} over all "
                          f"{topology.ranks} ranks without a common wire")
    return cycles


def wires_of(topology: Topology, wire_Bps: float | None = None) -> Wires:
    """Count the wires that lead from each rank to each other, without a switch in between; see
    `edge_disjoint_cycles`. Raises `ConfigError` if there are none."""
    links = {(a, b): data["bandwidth_Bps"] for a, b, data in topology.graph().edges(data=True)
             if isinstance(a, int) and isinstance(b, int)}
    if not links:
        raise ConfigError(f"{topology.name} has no direct link between two ranks: behind a switch "
                          f"every order of the ranks is a ring, and all rings share its ports")
    if wire_Bps is None:
        wire_Bps = min(links.values())
    check_bandwidth("wire_Bps", wire_Bps)
    wires: Wires = {rank: {} for rank in range(topology.ranks)}
    most = topology.ranks * 64  # more than any search gets through
    for (a, b), link_Bps in links.items():
        count = 1 if isinf(wire_Bps) else int(min(link_Bps / wire_Bps + 1e-9, most))
        if count:  # else it is thinner than a wire
            wires[a][b] = count
    return wires


def _check_possible(topology: Topology, wires: Wires, count: int) -> None:
    """Raise what can be said without a search: every ring leaves each rank once, and enters it."""
    if topology.ranks < 2:
        raise ConfigError(f"{topology.name}: a ring needs two ranks or more")
    for rank in wires:
        out = sum(wires[rank].values())
        into = sum(there.get(rank, 0) for there in wires.values())
        if min(out, into) < count:
            raise ConfigError(f"{topology.name}: {_rings(count)} need {count} wires out of each "
                              f"rank and into it; rank {rank} has {out} out and {into} in")
    if not nx.is_strongly_connected(nx.DiGraph(wires)):
        raise ConfigError(f"{topology.name}: its direct links don't join all ranks")


def _rings(count: int) -> str:
    return f"{count} ring{'s' * (count > 1)}"


def edges_of(cycle: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The steps of a ring, the last one leads back to its start.

    >>> list(edges_of([0, 2, 1]))
    [(0, 2), (2, 1), (1, 0)]
    """
    return zip(cycle, [*cycle[1:], *cycle[:1]], strict=True)


class _OutOfSteps(Exception):
    """The search has taken as long as it may."""


class Search:
    """Depth first: one cycle after the other, and if that leads nowhere, another one before."""

    def __init__(self, wires: Wires, steps: int):
        self._free = {rank: dict(there) for rank, there in wires.items()}
        self._steps = steps

    def cycles(self, count: int, last: Sequence[int] = ()) -> list[list[int]] | None:
        """`count` cycles of free wires, or None: there are none.

        The reverse of the `last` one is tried first: most links are as fast one way as the other.
        """
        if not count:
            return []
        back = [*last[:1], *last[:0:-1]]
        likely = [back] if last and self._is_free(back) else []
        for cycle in chain(likely, self.hamiltonian()):
            for a, b in edges_of(cycle):
                self._free[a][b] -= 1
            others = self.cycles(count - 1, cycle)
            if others is not None:
                return [cycle, *others]
            for a, b in edges_of(cycle):
                self._free[a][b] += 1
        return None

    def _is_free(self, cycle: list[int]) -> bool:
        return all(self._free[a].get(b) for a, b in edges_of(cycle))

    def hamiltonian(self) -> Iterator[list[int]]:
        """Every cycle over all ranks along free wires, from rank 0."""
        path, visited = [0], {0}
        ahead = [self._choices(0, visited)]  # for each rank on the path: where it may go on
        while ahead:
            following = next(ahead[-1], None)
            if following is None:
                ahead.pop()
                visited.discard(path.pop())
                continue
            path.append(following)
            visited.add(following)
            if len(path) == len(self._free) and self._free[following].get(0):
                yield path.copy()
            ahead.append(self._choices(following, visited))

    def _choices(self, rank: int, visited: set[int]) -> Iterator[int]:
        """Return where to go on from `rank`: over the thickest link; then where fewest ways lead
        on, for a rank that is left out now is hard to reach later (Warnsdorff's rule)."""
        self._steps -= 1
        if self._steps < 0:
            raise _OutOfSteps
        free = self._free

        def ways_on(there: int) -> int:
            return sum(wires > 0 and b not in visited for b, wires in free[there].items())

        near = [b for b, wires in free[rank].items() if wires and b not in visited]
        return iter(sorted(near, key=lambda b: (-free[rank][b], ways_on(b), b)))
