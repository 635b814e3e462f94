"""Rings without a common wire: found where they are, refused in one sentence where they aren't."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlab import ConfigError, topology
from dtlab.topology import Topology, edge_disjoint_cycles
from dtlab.topology.cycles import edges_of
from dtlab.topology.graphs import join

WIRE_BPS = 25e9


def mesh(*links: tuple[int, int, int]) -> Topology:
    """GPUs joined by (a, b, wires) full-duplex links."""
    graph = nx.DiGraph()
    for a, b, wires in links:
        join(graph, a, b, 1e-6, wires * WIRE_BPS)
    return topology.from_graph(graph, "mesh")


def complete(ranks: int) -> Topology:
    return mesh(*((a, b, 1) for a in range(ranks) for b in range(a)))


def check_rings(cluster: Topology, rings: list[list[int]], wire_Bps: float) -> None:
    """Each visits all ranks along direct links, and no link serves more rings than it has wires."""
    graph = cluster.graph()
    used = Counter(edge for ring in rings for edge in edges_of(ring))
    for ring in rings:
        assert sorted(ring) == list(range(cluster.ranks))
        assert ring[0] == 0
    for edge, times in used.items():
        assert times * wire_Bps <= graph.edges[edge]["bandwidth_Bps"]


FOUND = [
    (topology.v100_nvlink(), 6), (topology.v100_nvlink("pcie"), 6), (complete(3), 2),
    (complete(4), 2), (complete(5), 4), (complete(8), 7), (topology.torus(5, 5), 4),
    (topology.torus(3, 3, 3), 2), (topology.torus(2, 4), 2), (topology.torus(16, 16), 2),
    (topology.torus(1, 2), 1), (topology.torus(1, 9), 2),
]


@pytest.mark.parametrize(("cluster", "most"), FOUND, ids=lambda v: getattr(v, "name", str(v)))
def test_rings_visit_every_rank_and_share_no_wire(cluster: Topology, most: int) -> None:
    direct = [data["bandwidth_Bps"] for a, b, data in cluster.graph().edges(data=True)
              if isinstance(a, int) and isinstance(b, int)]
    for count in range(1, most + 1):
        rings = edge_disjoint_cycles(cluster, count)
        assert len(rings) == count
        check_rings(cluster, rings, min(direct))


def all_rings(links: set[tuple[int, int]], ranks: int) -> list[list[int]]:
    """The oracle: try every order."""
    orders = ([0, *rest] for rest in permutations(range(1, ranks)))
    return [ring for ring in orders if links.issuperset(edges_of(ring))]


@given(st.integers(3, 6), st.data())
def test_one_or_two_rings_are_found_exactly_where_there_are(ranks: int, data: Any) -> None:
    pairs = [(a, b) for a in range(ranks) for b in range(a)]
    chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True))
    try:
        cluster = mesh(*((a, b, 1) for a, b in chosen))
        assert cluster.ranks == ranks
    except (ConfigError, AssertionError):
        return  # no cluster
    links = {(a, b) for a, b in chosen} | {(b, a) for a, b in chosen}
    rings = all_rings(links, ranks)
    apart = [(r, s) for r in rings for s in rings if not set(edges_of(r)) & set(edges_of(s))]
    for count, there in ((1, rings), (2, apart)):
        if there:
            check_rings(cluster, edge_disjoint_cycles(cluster, count), WIRE_BPS)
        else:
            with pytest.raises(ConfigError):
                edge_disjoint_cycles(cluster, count)


def test_a_thick_link_carries_as_many_rings_as_it_has_wires() -> None:
    triangle = mesh((0, 1, 2), (1, 2, 2), (2, 0, 2))
    assert len(edge_disjoint_cycles(triangle, 4, wire_Bps=WIRE_BPS)) == 4
    with pytest.raises(ConfigError, match="rank 0 has 4 out and 4 in"):
        edge_disjoint_cycles(triangle, 5, wire_Bps=WIRE_BPS)
    assert len(edge_disjoint_cycles(triangle, 2)) == 2  # the slowest link is one wire
    with pytest.raises(ConfigError, match="3 rings"):
        edge_disjoint_cycles(triangle, 3)


def test_a_link_thinner_than_a_wire_carries_none() -> None:
    square = mesh((0, 1, 2), (1, 2, 2), (2, 3, 2), (3, 0, 2), (0, 2, 1))
    rings = edge_disjoint_cycles(square, 2, wire_Bps=2 * WIRE_BPS)
    assert {frozenset(edge) for ring in rings for edge in edges_of(ring)} == {
        frozenset(pair) for pair in ((0, 1), (1, 2), (2, 3), (3, 0))}


def test_a_first_ring_that_leaves_no_second_is_given_up() -> None:
    """Around an octahedron, some first rings leave a second one beside them, and some don't."""
    prism = mesh((0, 1, 1), (1, 2, 1), (2, 0, 1), (3, 4, 1), (4, 5, 1), (5, 3, 1), (0, 3, 1),
                 (1, 4, 1), (2, 5, 1), (0, 4, 1), (1, 5, 1), (2, 3, 1))
    check_rings(prism, edge_disjoint_cycles(prism, 4), WIRE_BPS)


IMPOSSIBLE = {
    "behind a switch": (topology.nvswitch(4), 1, "no direct link"),
    "one rank": (topology.uniform(1, 0, 1e9), 1, "no direct link"),
    "a path": (mesh((0, 1, 1), (1, 2, 1)), 1, "don't hold 1 ring over all 3"),
    "a star": (mesh((0, 1, 1), (0, 2, 1), (0, 3, 1)), 1, "don't hold 1 ring over all 4 ranks"),
    "K4, three times": (complete(4), 3, "don't hold 3 rings"),
    "too many": (complete(5), 5, "5 rings need 5 wires out of each rank and into it; rank 0 has 4"),
    "two islands": (topology.compose(complete(3), topology.racks(1, 2)), 1, "don't join all ranks"),
}


@pytest.mark.parametrize(("cluster", "count", "words"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_has_no_rings_says_so_in_one_sentence(
    cluster: Topology, count: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        edge_disjoint_cycles(cluster, count)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [
    {"count": 0}, {"count": -1}, {"count": 1.5}, {"count": True}, {"count": "two"},
    {"count": 1, "steps": 0}, {"count": 1, "wire_Bps": 0}, {"count": 1, "wire_Bps": -1e9},
    {"count": 1, "wire_Bps": float("nan")}, {"count": 1, "wire_Bps": "25GB/s"},
    {"count": 1, "wire_Bps": 1e30},
], ids=str)
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        edge_disjoint_cycles(complete(4), **options)


def test_the_search_ends_and_says_that_it_does_not_know() -> None:
    with pytest.raises(ConfigError, match="no 4 rings within 1,000 steps of search, nor that"):
        edge_disjoint_cycles(topology.torus(8, 8), 4, steps=1000)
