"""Options fit the wires they are read off; a contest counts what it simulates."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import networkx as nx
import pytest
import torch

import dtlab.wires
from dtlab import Comm, ConfigError, cost, simulate, topology
from dtlab.collectives import all_reduce
from dtlab.topology import Topology
from dtlab.topology.graphs import join
from dtlab.wires import contest, enter, examples, grid_of, group_of, options_for, rings_of, winners

N = 16_000_000


@pytest.mark.parametrize(("name", "group"), [
    ("nvswitch:8@racks:2x2", 8), ("racks:2x3,gpus=4", 4), ("racks:3x4", 4), ("pcie_server:8x4", 2),
    ("pcie_server:8x1", None), ("nvswitch:8", None), ("v100_nvlink", None), ("torus:4x4", None),
    ("fat_tree:4", 2), ("fat_tree:4x7", None), ("racks:4x1", None),
    ("uniform:6,latency_s=1us,bandwidth_Bps=1GB/s", None), ("v100_nvlink@racks:1x2", 8),
])
def test_groups_are_hosts_or_else_what_hangs_on_one_switch(name: str, group: int | None) -> None:
    assert group_of(topology.named(name)) == group


def test_ranks_of_a_host_that_are_no_neighbours_form_no_group() -> None:
    graph = nx.DiGraph()
    for rank in range(4):
        graph.add_node(rank, host=rank % 2)
        join(graph, rank, f"nic{rank % 2}", 0, 1e9)
    join(graph, "nic0", "nic1", 0, 1e9)
    assert group_of(topology.from_graph(graph, "mixed")) is None


@pytest.mark.parametrize(("cluster", "grid"), [
    (topology.torus(4, 4), (4, 4)), (topology.torus(4, 8), (8, 4)), (topology.torus(8, 4), (4, 8)),
    (topology.torus(3, 5), (5, 3)), (topology.torus(2, 2), (2, 2)), (topology.torus(1, 6), None),
    (topology.nvswitch(8), None), (topology.racks(2, 2), None),
], ids=lambda v: getattr(v, "name", str(v)))
def test_a_grid_is_one_whose_rows_and_columns_are_direct_links(
    cluster: Topology, grid: tuple[int, int] | None
) -> None:
    assert grid_of(cluster) == grid
    if grid:
        graph, (columns, rows) = cluster.graph(), grid
        for row in range(rows):
            ranks = [columns * row + c for c in (*range(columns), 0)]
            assert all(graph.has_edge(a, b) for a, b in pairwise(ranks))


def test_rings_use_every_wire_of_a_v100_server_and_of_a_small_torus() -> None:
    assert len(rings_of(topology.v100_nvlink())) == 6
    assert len(rings_of(topology.torus(4, 4))) == 4
    assert rings_of(topology.nvswitch(4)) == []
    assert len(rings_of(topology.torus(1, 4, bandwidth_Bps=float("inf")))) == 2
    assert rings_of(topology.torus(1, 1)) == []


@pytest.mark.parametrize("name", examples())
def test_every_option_is_accepted_and_gives_the_right_sum(name: str) -> None:
    cluster = examples()[name]

    def summed(comm: Comm, algorithm: str, options: dict[str, Any]) -> torch.Tensor:
        return all_reduce(comm, torch.full((101,), float(comm.rank)), algorithm=algorithm,
                          **options)

    for algorithm, options in options_for(cluster).items():
        total = sum(range(cluster.ranks))
        values = simulate(summed, algorithm, options, network=cluster).values
        assert all(bool((x == total).all()) for x in values), algorithm


def test_fitting_options_are_faster_than_the_defaults_where_wires_differ() -> None:
    of_8, of_4 = (topology.named(name) for name in ("nvswitch:8@racks:2x2", "nvswitch:4@racks:2x4"))
    for cluster, algorithms in ((of_8, ("hierarchical",)), (of_4, ("torus",)),
                                (topology.v100_nvlink(), ("hierarchical", "two_ring")),
                                (topology.torus(8, 4), ("torus", "two_ring"))):
        options = options_for(cluster)
        for algorithm in algorithms:
            fitted = enter(cluster, N, algorithm, options[algorithm]).elapsed_s
            assert fitted < enter(cluster, N, algorithm).elapsed_s, (cluster, algorithm)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling"])
def test_an_entry_takes_what_the_closed_form_says_on_a_uniform_network(algorithm: str) -> None:
    entry = enter(topology.uniform(8, 5e-6, 1e10), N, algorithm)
    assert entry.elapsed_s == pytest.approx(
        cost.time_s("all_reduce", algorithm, 8, N, 5e-6, 1e-10))
    sent = cost.sent_bytes("all_reduce", algorithm, 8, N)
    assert [entry.crossed[rank, "switch"] for rank in range(8)] == sent
    assert entry.needed_s[entry.busiest] == pytest.approx(max(sent) / 1e10)


def test_near_partners_first_keep_the_large_halves_inside_a_rack() -> None:
    """Ranks 1, 2, 4 apart are in a rack of 8: what leaves it, there and back, is what 8 ranks swap
    of their eighths with g racks, 2(g−1)/g·n."""
    for groups in (2, 4, 8):
        cluster = topology.racks(groups, 8)
        crossed = enter(cluster, 64 * 400, "halving_doubling_near").crossed
        assert crossed["rack0", "spine"] == 2 * (groups - 1) * 64 * 400 // groups


@pytest.mark.parametrize("entry", contest(examples(), [64_000]), ids=lambda e: e[0] + " " + e[2])
def test_no_run_is_faster_than_its_busiest_link(entry: dtlab.wires.ContestEntry) -> None:
    assert entry.needed_s[entry.busiest] == max(entry.needed_s.values())
    cluster = examples()[entry.cluster]
    assert entry.needed_s == {ends: entry.crossed[ends] / cluster.capacity_Bps[link] for link in
                              range(len(cluster.capacity_Bps)) for ends in [cluster.ends(link)]}
    assert entry.elapsed_s >= entry.needed_s[entry.busiest]


def test_a_link_that_has_failed_needs_no_time() -> None:
    broken = topology.with_link(topology.v100_nvlink(), 0, 3, bandwidth_Bps=0)
    assert enter(broken, N, "ring").elapsed_s > 0


def test_winners_are_the_fastest_of_each_cluster_and_size_and_all_that_tie() -> None:
    def entry(cluster: str, nbytes: int, algorithm: str, elapsed_s: float
              ) -> dtlab.wires.ContestEntry:
        return dtlab.wires.ContestEntry(cluster, 4, algorithm, nbytes, elapsed_s, {}, {})

    entries = [entry("a", 4, "ring", 1.0), entry("a", 4, "tree", 1.005),
               entry("a", 4, "flat", 1.02), entry("a", 8, "ring", 3.0), entry("a", 8, "tree", 2.0),
               entry("b", 4, "flat", 9.0)]
    assert winners(entries) == {("a", 4, "ring"), ("a", 4, "tree"), ("a", 8, "tree"),
                                ("b", 4, "flat")}
    assert winners([]) == set()


@pytest.mark.parametrize(("sizes", "algorithms"), [
    ([5], ["ring"]), ([0], ["ring"]), ([-4], ["ring"]), ([4.0], ["ring"]), ([True], ["ring"]),
    ([400], ["telepathy"]),
])
def test_nonsense_is_refused(sizes: list[Any], algorithms: list[str]) -> None:
    with pytest.raises(ConfigError):
        contest({"one": topology.nvswitch(2)}, sizes, algorithms)
    with pytest.raises(ConfigError, match=r"by name, not .*: {'two racks': topology"):
        contest(topology.nvswitch(2), [400])  # type: ignore[arg-type]
