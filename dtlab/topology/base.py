"""The class of all topologies, and the simplest one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import networkx as nx

from dtlab.checks import check_amount, check_number, check_whole, is_whole
from dtlab.errors import ConfigError

Node = int | str  # ranks are numbered, all else has a name
OVERHEAD_S = 1e-6  # what starting a message takes on today's network cards, roughly


@dataclass(frozen=True)
class Change:
    """At virtual time `at_s`, the link of this number gets another bandwidth (0: it fails) or
    latency (None: as before), and `load_Bps` more traffic of others. See `with_link`."""

    at_s: float
    link: int
    bandwidth_Bps: float | None = None
    latency_s: float | None = None
    load_Bps: float = 0.0


def _unknown(link: int) -> tuple[Node, Node]:
    raise ConfigError(f"this topology does not say what link {link} joins")


@dataclass(frozen=True)
class Topology:
    """`ranks` processes joined by links.

    capacity_Bps: bandwidth of each link, bytes per second, one direction.
    route: (src, dst) → (latency in seconds, numbers of the links crossed).
    graph: () → a networkx DiGraph of hosts and switches, for drawing; edges carry
           `latency_s`, `bandwidth_Bps`; rank r is the node r.
    ends: number of a link → (the node it comes from, the node it leads to).
    host_of: rank → number of the host it runs on; each rank has its own unless a builder says
           otherwise.
    changes: what happens to links while a simulation runs; all else holds at its start.
    overhead_s: seconds for which starting a message occupies its sender's port, so that a rank
           starts one message after another (the o of LogGP, as the sender pays it). It is part of
           the message's latency: where a route's latency is less, that takes its place.
           Source: Alexandrov, Ionescu, Schauser, Scheiman 1995, LogGP.
    """

    name: str
    ranks: int
    capacity_Bps: tuple[float, ...]
    route: Callable[[int, int], tuple[float, tuple[int, ...]]]
    graph: Callable[[], nx.DiGraph]
    ends: Callable[[int], tuple[Node, Node]] = _unknown
    host_of: Callable[[int], int] = int
    changes: tuple[Change, ...] = ()
    overhead_s: float = OVERHEAD_S

    def __post_init__(self) -> None:
        check_amount("overhead_s", self.overhead_s)

    @property
    def groups(self) -> list[list[int]]:
        """The ranks of each host, as hierarchical algorithms want them.

        >>> uniform(3, 0, 1e9).groups
        [[0], [1], [2]]
        """
        ranks_of: dict[int, list[int]] = {}
        for rank in range(self.ranks):
            ranks_of.setdefault(self.host_of(rank), []).append(rank)
        return [ranks_of[host] for host in sorted(ranks_of)]

    def path(self, src: int, dst: int) -> list[Node]:
        """The nodes on the way from rank `src` to rank `dst`, both included; [src] if they are one.
        Raises `ConfigError` for a rank that there is not.

        >>> uniform(3, 0, 1e9).path(0, 2)
        [0, 'switch', 2]
        """
        for rank in (src, dst):
            check_rank(rank, self.ranks)
        if src == dst:
            return [src]
        return [src, *(self.ends(link)[1] for link in self.route(src, dst)[1])]

    def __repr__(self) -> str:
        return f"<Topology {self.name}: {self.ranks} ranks, {len(self.capacity_Bps)} links>"


def uniform(ranks: int, latency_s: float, bandwidth_Bps: float) -> Topology:
    """Every rank has one full-duplex port into a switch that is never the bottleneck.

    A message of n bytes alone takes latency_s + n/bandwidth_Bps. Messages that leave the same rank
    start one after another, latency_s apart (overhead_s is all of latency_s), and share its port;
    messages that arrive at the same rank share its port, too. This is the machine of the α–β
    model: α = latency_s, β = 1/bandwidth_Bps. An infinite bandwidth is allowed. Raises
    `ConfigError` for arguments that make no sense.

    >>> uniform(4, 5e-6, 10e9)
    <Topology uniform(4 ranks, 5 µs, 10 GB/s): 4 ranks, 8 links>
    """
    check_ranks(ranks)
    check_link(latency_s, bandwidth_Bps)
    ranks, latency_s = int(ranks), float(latency_s)

    def route(src: int, dst: int) -> tuple[float, tuple[int, ...]]:
        return latency_s, (2 * src, 2 * dst + 1)  # src's way out, dst's way in

    def graph() -> nx.DiGraph:
        # Half of the latency on the way to the switch, half on the way from it.
        g = nx.DiGraph(name="uniform")
        g.add_node("switch", kind="switch")
        for rank in range(ranks):
            g.add_node(rank, kind="host")
            for edge in ((rank, "switch"), ("switch", rank)):
                g.add_edge(*edge, latency_s=latency_s / 2, bandwidth_Bps=bandwidth_Bps)
        return g

    def ends(link: int) -> tuple[Node, Node]:
        return ("switch", link // 2) if link % 2 else (link // 2, "switch")

    name = f"uniform({ranks} ranks, {latency_s * 1e6:g} µs, {bandwidth_Bps / 1e9:g} GB/s)"
    return Topology(name, ranks, (float(bandwidth_Bps),) * (2 * ranks), route, graph,
                    ends, overhead_s=latency_s)


MOST_UNIFORM = 1 << 24  # ranks of a uniform cluster, which has no graph until it is drawn
MOST_NODES = 1 << 18  # of any other: its graph is made at once


def check_ranks(ranks: int) -> None:
    """Raise `ConfigError` unless `ranks` is a whole number, 1 to `MOST_UNIFORM`."""
    check_whole("ranks", ranks, most=MOST_UNIFORM)


def check_count(name: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is a whole number, 1 to `MOST_NODES`."""
    check_whole(name, value, most=MOST_NODES)


def check_total(what: str, *counts: int) -> None:
    """Raise `ConfigError` if the product of `counts` is more than `MOST_NODES`."""
    if math.prod(map(int, counts)) > MOST_NODES:
        raise ConfigError(f"{' x '.join(map(str, counts))} {what} are too many: a cluster can have "
                          f"{MOST_NODES:,}")


def check_link(latency_s: float, bandwidth_Bps: float) -> None:
    """Raise `ConfigError` unless latency ≥ 0 (finite) and bandwidth > 0."""
    check_amount("latency_s", latency_s)
    check_bandwidth("bandwidth_Bps", bandwidth_Bps)


def check_bandwidth(name: str, value: float) -> None:
    """Raise `ConfigError` unless `value` is a bandwidth: more than 0, maybe infinite."""
    check_number(name, value)
    if value <= 0:
        raise ConfigError(f"{name} must be more than 0 bytes a second, not {value}")


def check_rank(rank: object, ranks: int) -> None:
    """Raise `ConfigError` unless `rank` is one of `ranks`."""
    if not is_whole(rank) or rank not in range(ranks):
        raise ConfigError(f"there is no rank {rank!r:.60}; ranks are 0 to {ranks - 1}")


def check_pair(src: object, dst: object, ranks: int) -> None:
    """Raise `ConfigError` unless these are two different ones of `ranks` ranks."""
    check_rank(src, ranks)
    check_rank(dst, ranks)
    if src == dst:
        raise ConfigError(f"nothing goes from rank {src} to itself; choose two ranks")


def check_topology(name: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is a `Topology`."""
    if not isinstance(value, Topology):
        raise ConfigError(f"{name} must be a Topology, not {value!r:.60}")
