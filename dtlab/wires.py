"""The all-reduce that suits given wires: options from a topology, and a contest in the simulator.

Algorithms know nothing of topologies, only of ranks; this module brings the two together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dtlab.collectives import all_reduce
from dtlab.collectives.registry import check_algorithm
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.simulator import simulate
from dtlab.topology import (
    Node,
    Topology,
    compose,
    edge_disjoint_cycles,
    link_bytes,
    nvswitch,
    pcie_server,
    racks,
    torus,
    v100_nvlink,
)
from dtlab.topology.cycles import wires_of

Options = dict[str, Any]
Link = tuple[Node, Node]  # from, to
CONTESTANTS = ("tree", "ring", "halving_doubling", "halving_doubling_near",
               "hierarchical", "torus", "two_ring")
SEARCH_STEPS = 50_000  # for rings: a tenth of a second or two
SIZES = (4_000, 64_000, 1_000_000, 16_000_000, 160_000_000)  # bytes


class ContestEntry(NamedTuple):
    """One all-reduce in a contest, simulated."""

    cluster: str
    ranks: int
    algorithm: str
    nbytes: int
    elapsed_s: float  # virtual
    crossed: Mapping[Link, int]  # bytes on each link, one direction
    needed_s: Mapping[Link, float]  # how long each link needs for them, at full speed

    @property
    def busiest(self) -> Link:
        """The link that needs longest for its bytes: the all-reduce can't take less."""
        return max(self.needed_s, key=self.needed_s.__getitem__)


def options_for(cluster: Topology) -> dict[str, Options]:
    """algorithm → the options that fit its all-reduce to the wires of `cluster`.

    hierarchical: `group`, the ranks of a host, or those under one switch, or a row of the grid.
    torus: `shape`, the grid of direct links, or else (ranks of a group, groups). two_ring:
    `cycles`, as many as share no wire. An algorithm that the wires say nothing about is missing:
    its defaults must do.

    >>> from dtlab.topology import named
    >>> options_for(named("nvswitch:8@racks:2x2"))
    {'hierarchical': {'group': 8}, 'torus': {'shape': (8, 4)}}
    """
    found: dict[str, Options] = {}
    group, grid = group_of(cluster), grid_of(cluster)
    if grid is None and group is not None:
        grid = group, cluster.ranks // group
    if grid is not None:
        found = {"hierarchical": {"group": group or grid[0]}, "torus": {"shape": grid}}
    if cycles := rings_of(cluster):
        found["two_ring"] = {"cycles": cycles}
    return found


def group_of(cluster: Topology) -> int | None:
    """k, if the ranks 0 to k−1, k to 2k−1, … sit together: in one host, or under one switch and
    without links of their own."""
    graph = cluster.graph()
    under: dict[Node, list[int]] = {}
    for rank in range(cluster.ranks):
        under.setdefault(next(iter(sorted(graph[rank], key=str)), rank), []).append(rank)
    direct = any(isinstance(a, int) and isinstance(b, int) for a, b in graph.edges)
    for groups in [cluster.groups] if direct else [cluster.groups, list(under.values())]:
        k = len(groups[0])
        in_order = [list(range(first, first + k)) for first in range(0, cluster.ranks, k)]
        if 1 < k < cluster.ranks and groups == in_order:
            return k
    return None


def grid_of(cluster: Topology) -> tuple[int, int] | None:
    """(X, Y), if ranks form Y rows of X, each row and column a ring of direct links."""
    graph, p = cluster.graph(), cluster.ranks
    for x in range(2, p // 2 + 1):
        if p % x == 0:
            right = ((r, r - r % x + (r + 1) % x) for r in range(p))
            down = ((r, (r + x) % p) for r in range(p))
            if all(graph.has_edge(a, b) for a, b in (*right, *down)):
                return x, p // x
    return None


def rings_of(cluster: Topology) -> list[list[int]]:
    """Return as many rings without a common wire as a short search finds; none behind switches."""
    try:
        most = min(sum(there.values()) for there in wires_of(cluster).values())
    except ConfigError:
        return []
    for count in range(most, 0, -1):
        try:
            return edge_disjoint_cycles(cluster, count, steps=SEARCH_STEPS)
        except ConfigError:
            continue
    return []


def contest(clusters: Mapping[str, Topology], sizes: Sequence[int] = SIZES,
            algorithms: Sequence[str] = CONTESTANTS) -> list[ContestEntry]:
    """Simulate each algorithm, with `options_for` each cluster, on vectors of these sizes.

    clusters: name → topology. sizes: bytes of float32, so multiples of 4. Returns the entries,
    cluster by cluster, size by size. Raises `ConfigError` for unknown algorithms and such sizes.
    """
    if not isinstance(clusters, Mapping):
        raise ConfigError(f"contest takes clusters by name, not {clusters!r}: "
                          f"{{'two racks': topology.racks(2, 4)}}, say")
    entries = []
    for name, cluster in clusters.items():
        options = options_for(cluster)
        entries += [enter(cluster, nbytes, algorithm, options.get(algorithm), name)
                    for nbytes in sizes for algorithm in algorithms]
    return entries


def enter(cluster: Topology, nbytes: int, algorithm: str, options: Options | None = None,
          name: str = "") -> ContestEntry:
    """Simulate one all-reduce of `nbytes` bytes of float32 on `cluster`.

    name: of the cluster, for tables (default: its own). Raises `ConfigError` as `contest` does.
    """
    check_algorithm("all_reduce", algorithm, auto=False)
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 4 or nbytes % 4:
        raise ConfigError(f"nbytes must be a multiple of 4, and 4 or more, not {nbytes!r}")

    def reduced(comm: Comm) -> None:
        x = torch.empty(nbytes // 4, device="meta")
        all_reduce(comm, x, algorithm=algorithm, **options or {})

    result = simulate(reduced, network=cluster)
    crossed = link_bytes(cluster, result.trace)
    needed_s = {cluster.ends(link): crossed[cluster.ends(link)] / Bps if Bps else 0.0  # 0: failed
                for link, Bps in enumerate(cluster.capacity_Bps)}
    return ContestEntry(name or cluster.name, cluster.ranks, algorithm, nbytes, result.elapsed_s,
                        crossed, needed_s)


def winners(entries: Sequence[ContestEntry], within: float = 0.01) -> set[tuple[str, int, str]]:
    """(cluster, bytes, algorithm) of the fastest entry for each cluster and size, and of those that
    are at most `within` slower."""
    best: dict[tuple[str, int], float] = {}
    for entry in entries:
        key = entry.cluster, entry.nbytes
        best[key] = min(entry.elapsed_s, best.get(key, entry.elapsed_s))
    return {(e.cluster, e.nbytes, e.algorithm) for e in entries
            if e.elapsed_s <= best[e.cluster, e.nbytes] * (1 + within)}


def examples() -> dict[str, Topology]:
    """Clusters of many kinds, with their names: where the contest is usually held."""
    return {
        "NVSwitch, 8 GPUs": nvswitch(8),
        "8 V100, NVLink mesh": v100_nvlink(),
        "PCIe, 8 GPUs": pcie_server(8, 4),
        "torus 4 × 4": torus(4, 4),
        "racks 4 × 8, 4:1": racks(4, 8, oversubscription=4),
        "racks 4 × 8, 16:1": racks(4, 8, oversubscription=16),
        "NVSwitch servers in racks": compose(nvswitch(8), racks(2, 2, oversubscription=2)),
    }
