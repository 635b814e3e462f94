"""Any graph is a cluster: its routes are its shortest paths, the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import networkx as nx
import pytest

import dtlab
from dtlab import topology
from dtlab.topology.graphs import join, pair_hash

CLUSTERS = {
    "pcie_server": topology.pcie_server(8, 4),
    "v100_nvlink": topology.v100_nvlink(),
    "v100_nvlink pcie": topology.v100_nvlink("pcie"),
    "nvswitch": topology.nvswitch(8),
    "racks": topology.racks(3, 4),
    "racks of GPUs": topology.racks(2, 2, gpus=3),
    "torus": topology.torus(3, 4),
    "torus 3D": topology.torus(2, 3, 4),
    "fat_tree": topology.fat_tree(4),
    "fat_tree in part": topology.fat_tree(6, hosts=20, oversubscription=2),
    "dragonfly": topology.dragonfly(5, 3, 2),
    "composed": topology.compose(topology.nvswitch(2), topology.racks(2, 2)),
    "composed at the CPU": topology.compose(topology.pcie_server(), topology.torus(2, 2), "cpu"),
}
SHORTEST = set(CLUSTERS) - {"v100_nvlink pcie", "dragonfly", "composed", "composed at the CPU"}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_a_route_is_a_walk_in_the_graph_and_its_latency_the_sum(
    cluster: topology.Topology
) -> None:
    graph = cluster.graph()
    assert len(cluster.capacity_Bps) == graph.number_of_edges()
    assert {node for node in graph if isinstance(node, int)} == set(range(cluster.ranks))
    for src in range(cluster.ranks):
        assert cluster.route(src, src) == (0, ())
        for dst in set(range(cluster.ranks)) - {src}:
            latency_s, links = cluster.route(src, dst)
            path = cluster.path(src, dst)
            assert (path[0], path[-1]) == (src, dst)
            assert len(set(path)) == len(path)
            edges = list(pairwise(path))
            assert [cluster.ends(link) for link in links] == edges
            assert latency_s == pytest.approx(sum(graph.edges[e]["latency_s"] for e in edges))
            assert [cluster.capacity_Bps[link] for link in links] == [
                graph.edges[e]["bandwidth_Bps"] for e in edges]
    assert all(graph.edges[b, a] == data for (a, b), data in graph.edges.items())  # full duplex


@pytest.mark.parametrize("name", sorted(SHORTEST))
def test_builders_that_know_their_routes_take_shortest_ones(name: str) -> None:
    cluster = CLUSTERS[name]
    hops = dict(nx.all_pairs_shortest_path_length(cluster.graph()))
    for src in range(cluster.ranks):
        for dst in range(cluster.ranks):
            assert len(cluster.route(src, dst)[1]) == hops[src][dst]


def test_fewest_links_win_before_latency_and_latency_among_equals() -> None:
    graph = nx.DiGraph()
    for a, b, latency_s in [(0, "a", 1e-6), ("a", "c", 1e-6), ("c", 1, 1e-6),
                            (0, "b", 5e-6), ("b", 1, 5e-6), (0, "d", 5e-6), ("d", 1, 4e-6)]:
        join(graph, a, b, latency_s, 1e9)
    cluster = topology.from_graph(graph, "three ways")
    assert cluster.path(0, 1) == [0, "d", 1]
    assert cluster.route(0, 1)[0] == pytest.approx(9e-6)


def test_equal_routes_are_all_used() -> None:
    graph = nx.DiGraph()
    for rank in range(16):
        for spine in "abcd":
            join(graph, rank, spine, 1e-6, 1e9)
    cluster = topology.from_graph(graph, "four spines")
    used = [cluster.path(s, d)[1] for s in range(16) for d in range(16) if s != d]
    assert all(40 <= used.count(spine) <= 80 for spine in "abcd")  # 60 each on average


def test_routes_and_rings_are_the_same_in_every_process() -> None:
    program = ("from dtlab import topology as t\n"
               "g = t.from_graph(t.fat_tree(4).graph(), 'tree')\n"
               "for c in (g, t.fat_tree(4), t.torus(4, 4), t.v100_nvlink()):\n"
               "    print([c.path(s, d) for s in range(c.ranks) for d in range(c.ranks)])\n"
               "print(t.edge_disjoint_cycles(t.torus(5, 5), 4))")
    told = {subprocess.run([sys.executable, "-c", program], capture_output=True, check=True,
                           env=os.environ | {"PYTHONHASHSEED": seed}).stdout
            for seed in ("1", "2")}
    assert len(told) == 1
    assert pair_hash(3, 5) == 5996392994229466996  # on every machine


def test_a_thousand_hosts_are_routed_by_search_quickly() -> None:
    cluster = topology.from_graph(topology.torus(32, 32).graph(), "a grid")
    assert sum(len(cluster.route(r, (r + 1) % 1024)[1]) for r in range(0, 1024, 32)) == 32


def graph_of(*edges: tuple[Any, Any], **attributes: Any) -> nx.DiGraph:
    graph = nx.DiGraph()
    for a, b in edges:
        graph.add_edge(a, b, **({"latency_s": 1e-6, "bandwidth_Bps": 1e9} | attributes))
    return graph


def both_ways(*edges: tuple[Any, Any], **attributes: Any) -> nx.DiGraph:
    return graph_of(*edges, *((b, a) for a, b in edges), **attributes)


def with_kind(graph: nx.DiGraph, node: Any, kind: str) -> nx.DiGraph:
    graph.nodes[node]["kind"] = kind
    return graph


@pytest.mark.parametrize(("graph", "says"), [
    (nx.Graph(), "must be a networkx.DiGraph"),
    (nx.MultiDiGraph(), "must be a networkx.DiGraph"),
    (nx.DiGraph(), "needs a rank"),
    (both_ways(("a", "b")), "needs a rank"),
    (both_ways((0, 2)), "there is rank 2, but no rank 1"),
    (both_ways((1, 2)), "no rank 0"),
    (both_ways((0, 1), ((2, 3), 0)), r"node \(2, 3\) must be a rank"),
    (both_ways((0, "1")), "node '1' is a string"),
    (with_kind(both_ways((0, 1)), 1, "switch"), "node 1 is a switch, so it needs a name"),
    (with_kind(both_ways((0, "a"), ("a", 1)), "a", "gpu"), "node 'a' is a gpu"),
    (both_ways((0, 1), (0, 0)), "link from rank 0 to rank 0 leads back"),
    (both_ways((0, 1), bandwidth_Bps=0), "link from rank 0 to rank 1: bandwidth_Bps must be more"),
    (both_ways((0, 1), latency_s=-1), "latency_s must be 0 or more"),
    (nx.DiGraph([(0, 1), (1, 0)]), "link from rank 0 to rank 1 has no latency_s"),
    (both_ways((0, 1), (2, 3)), "no way from rank 0 to rank 2"),
    (graph_of((0, 1), (1, 2)), "no way from rank 1 to rank 0"),  # a ring that isn't
])
def test_a_graph_that_is_no_cluster_is_refused(graph: Any, says: str) -> None:
    with pytest.raises(dtlab.ConfigError, match=says):
        topology.from_graph(graph, "bad")


def test_a_one_way_ring_is_a_cluster() -> None:
    cluster = topology.from_graph(graph_of((0, 1), (1, 2), (2, 0)), "one way")
    assert cluster.path(1, 0) == [1, 2, 0]


def test_a_topology_does_not_change_with_the_graphs_it_was_made_of_or_gave() -> None:
    graph = both_ways((0, "s"), ("s", 1))
    cluster = topology.from_graph(graph, "frozen")
    graph.remove_node("s")
    cluster.graph().clear()
    assert cluster.path(0, 1) == [0, "s", 1]


def test_groups_are_the_ranks_of_each_host() -> None:
    assert topology.uniform(3, 0, 1).groups == [[0], [1], [2]]
    assert topology.nvswitch(3).groups == [[0, 1, 2]]
    assert topology.racks(2, 1, gpus=2).groups == [[0, 1], [2, 3]]
    composed = CLUSTERS["composed"]
    assert composed.groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert composed.host_of(5) == 2
