"""Each builder builds what its source describes: links, distances, bandwidths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import product
from typing import Any

import networkx as nx
import pytest

import dtlab
from dtlab import topology
from dtlab.topology import (
    Topology,
    compose,
    dragonfly,
    fat_tree,
    nvswitch,
    pcie_server,
    racks,
    torus,
    v100_nvlink,
)
from dtlab.topology.servers import V100_LINKS


def between(graph: nx.DiGraph, a: Any, b: Any) -> float:
    return float(graph.edges[a, b]["bandwidth_Bps"])


def bandwidth_across(cluster: Topology, one_side: Iterable[int]) -> float:
    """What all ranks of one side together can send to the other side: a maximum flow."""
    graph = cluster.graph()
    side = set(one_side)
    for rank in range(cluster.ranks):
        graph.add_edge(*(("source", rank) if rank in side else (rank, "sink")))  # no limit
    return float(nx.maximum_flow_value(graph, "source", "sink", capacity="bandwidth_Bps"))


# ---- servers -----------------------------------------------------------------------------------


def test_each_v100_has_six_nvlinks_of_25_gigabytes_to_four_neighbours() -> None:
    graph = v100_nvlink().graph()
    for gpu in range(8):
        speeds = sorted(between(graph, gpu, n) for n in graph[gpu] if isinstance(n, int))
        assert speeds == [25e9, 25e9, 50e9, 50e9]


def test_v100s_without_an_nvlink_meet_over_a_common_neighbour_or_pcie() -> None:
    over_gpu, over_pcie = v100_nvlink(), v100_nvlink(detour="pcie")
    for src, dst in product(range(8), repeat=2):
        if src == dst:
            continue
        if (min(src, dst), max(src, dst)) in V100_LINKS:
            assert over_gpu.path(src, dst) == over_pcie.path(src, dst) == [src, dst]
        else:
            (middle,) = over_gpu.path(src, dst)[1:-1]
            assert middle in range(8)
            assert all(isinstance(node, str) for node in over_pcie.path(src, dst)[1:-1])


def test_gpus_of_one_pcie_switch_leave_the_uplink_alone() -> None:
    server = pcie_server(8, 2)
    assert server.path(0, 3) == [0, "pcie0", 3]
    assert server.path(0, 4) == [0, "pcie0", "cpu", "pcie1", 4]


# ---- bandwidth between halves ------------------------------------------------------------------


@pytest.mark.parametrize(("cluster", "half", "closed_Bps"), [
    (topology.uniform(8, 0, 1e9), range(4), 4e9),
    (nvswitch(8, bandwidth_Bps=300e9), range(4), 4 * 300e9),
    (pcie_server(4, 2, bandwidth_Bps=16e9), range(2), 16e9),
    (v100_nvlink(link_Bps=25e9, sockets_Bps=19.2e9), range(4), 6 * 25e9 + 19.2e9),
    (racks(4, 8, oversubscription=4, bandwidth_Bps=1e9), range(16), 2 * 8 * 1e9 / 4),
    (racks(2, 3, oversubscription=1, bandwidth_Bps=1e9), range(3), 3e9),
    (torus(4, 6, bandwidth_Bps=1e9), range(12), 2 * 6 * 1e9),  # two cuts of y links each
    (torus(4, 3, 3, bandwidth_Bps=1e9), range(18), 2 * 9 * 1e9),
    (fat_tree(4, bandwidth_Bps=1e9), range(8), 8e9),
    (fat_tree(6, bandwidth_Bps=1e9), range(27), 27e9),
    (fat_tree(4, oversubscription=4, bandwidth_Bps=1e9), range(8), 8e9 / 4),
    (fat_tree(8, oversubscription=2, bandwidth_Bps=1e9), range(64), 64e9 / 2),
    (dragonfly(4, 3, 2, bandwidth_Bps=1e9, global_Bps=0.5e9), range(12), 2 * 2 * 0.5e9),
    (compose(nvswitch(8), racks(2, 2, oversubscription=2, bandwidth_Bps=1e9)), range(16), 2e9 / 2),
], ids=lambda value: value.name if isinstance(value, Topology) else "")
def test_bandwidth_between_two_halves_is_the_closed_form(
    cluster: Topology, half: range, closed_Bps: float
) -> None:
    others = set(range(cluster.ranks)) - set(half)
    assert bandwidth_across(cluster, half) == pytest.approx(closed_Bps)
    assert bandwidth_across(cluster, others) == pytest.approx(closed_Bps)


# ---- shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 5, 1), (2, 2, 1), (4, 6, 1), (5, 3, 1),
                                   (2, 3, 4), (3, 3, 3)])
def test_distances_in_a_torus_are_the_shorter_ways_round_added_up(
    shape: tuple[int, int, int]
) -> None:
    cluster = torus(*shape)
    neighbours = sum(min(n - 1, 2) for n in shape)  # along each dimension two, if there are two
    assert len(cluster.capacity_Bps) == neighbours * cluster.ranks
    places = list(product(*map(range, shape)))  # in the order of the ranks
    for (src, a), (dst, b) in product(enumerate(places), repeat=2):
        ways = [min((q - p) % n, (p - q) % n) for p, q, n in zip(a, b, shape, strict=True)]
        assert len(cluster.route(src, dst)[1]) == sum(ways)


@pytest.mark.parametrize("k", [2, 4, 6, 8])
def test_a_fat_tree_has_the_papers_numbers(k: int) -> None:
    cluster = fat_tree(k)
    graph = cluster.graph()
    assert cluster.ranks == k**3 // 4
    assert len(graph) - cluster.ranks == k * k + (k // 2) ** 2  # switches
    assert all(graph.out_degree(n) == k for n in graph if isinstance(n, str))  # each has k ports
    assert graph.number_of_edges() == 2 * 3 * cluster.ranks


def test_flows_between_pods_use_every_core_switch() -> None:
    cluster = fat_tree(4)
    cores = {cluster.path(s, d)[3] for s in range(4) for d in range(4, 16)}
    assert cores == {f"core{i}" for i in range(4)}


def test_d_mod_k_keeps_the_flows_of_every_shift_apart_and_a_hash_does_not() -> None:
    def most_on_a_link(cluster: Topology, shift: int) -> int:
        links = (link for src in range(cluster.ranks)
                 for link in cluster.route(src, (src + shift) % cluster.ranks)[1])
        return max(Counter(links).values())

    for k in (2, 4, 6):
        cluster = fat_tree(k, routing="d_mod_k")
        assert {most_on_a_link(cluster, shift) for shift in range(1, cluster.ranks)} == {1}
    hashed = fat_tree(4)
    assert max(most_on_a_link(hashed, shift) for shift in range(1, 16)) == 3
    with pytest.raises(dtlab.ConfigError, match="choose one of hash, d_mod_k"):
        fat_tree(4, routing="random")


def test_a_fat_tree_with_fewer_hosts_fills_its_edge_switches_in_turn() -> None:
    cluster = fat_tree(16, hosts=20)
    assert cluster.ranks == 20
    assert cluster.path(0, 7) == [0, "edge0", 7]
    assert cluster.path(0, 19)[-2] == "edge2"


def test_every_two_groups_of_a_dragonfly_share_one_long_link() -> None:
    cluster = dragonfly(9, 4, 2, global_latency_s=9e-6)  # balanced: 2 long links a router
    graph = cluster.graph()
    long = [edge for edge, data in graph.edges.items() if data["latency_s"] == 9e-6]
    assert len(long) == 9 * 8
    assert {sum(a == f"router{r}" for a, _ in long) for r in range(36)} == {2}
    assert max(len(cluster.path(s, d)) for s in range(8) for d in range(72)) == 6


def test_servers_in_racks_reach_out_over_their_card_and_talk_inside_without_it() -> None:
    cluster = compose(v100_nvlink(), racks(2, 2))
    assert cluster.path(8, 12) == [8, 12]
    assert cluster.path(0, 15) == [0, "server0.nic", "rack0", "server1.nic", 15]
    at_cpu = compose(pcie_server(), racks(1, 2), nic_at="cpu")
    assert at_cpu.path(0, 1) == [0, "server0.pcie0", 1]
    assert at_cpu.path(3, 4) == [3, "server0.pcie1", "server0.cpu", "server0.nic", "rack0",
                                 "server1.nic", "server1.cpu", "server1.pcie0", 4]


def test_gpus_of_a_host_share_its_network_card() -> None:
    cluster = racks(2, 2, gpus=4, oversubscription=1, bandwidth_Bps=1e9)
    assert cluster.path(0, 15) == [0, "host0", "rack0", "spine", "rack1", "host3", 15]
    assert bandwidth_across(cluster, range(4)) == 1e9


@pytest.mark.parametrize(("build", "says"), [
    (lambda: pcie_server(5, 2), "divides 5"),
    (lambda: pcie_server(0), "gpus must be a whole number, 1 or more, not 0"),
    (lambda: pcie_server(4, 2, bandwidth_Bps=0), "bandwidth_Bps"),
    (lambda: v100_nvlink("nvlink"), "no detour 'nvlink'; choose one of gpu, pcie"),
    (lambda: nvswitch(2.5), "gpus"),  # type: ignore[arg-type]
    (lambda: racks(2, 0), "hosts must be"),
    (lambda: racks(2, 2, oversubscription=0), "oversubscription must be a number above 0"),
    (lambda: racks(2, 2, oversubscription="4:1"), "'4:1'"),  # type: ignore[arg-type]
    (lambda: racks(2, 2, latency_s=-1), "latency_s"),
    (lambda: fat_tree(3), "k must be even"),
    (lambda: fat_tree(4, hosts=17), "room for 16 hosts, not 17"),
    (lambda: torus(0, 4), "x must be"),
    (lambda: torus(4, True), "y must be"),
    (lambda: dragonfly(2, 2, -1), "hosts must be"),
    (lambda: compose(nvswitch(2), racks(1, 2), nic_at="cpu"), "nic_at must be .*nvswitch; not"),
    (lambda: compose(nvswitch(2), compose(nvswitch(2), racks(1, 2))), "servers already"),
])
def test_arguments_that_make_no_sense_are_refused(build: Any, says: str) -> None:
    with pytest.raises(dtlab.ConfigError, match=says):
        build()
