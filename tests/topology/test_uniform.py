"""A topology is a description: the simulator, the plots and the planner read the same one."""

from __future__ import annotations

import math
from typing import Any

import networkx as nx
import pytest

import dtlab
from dtlab.topology import uniform


def test_routes_of_a_uniform_network_cross_two_ports() -> None:
    network = uniform(3, 2e-6, 5e9)
    assert network.ranks == 3
    assert network.capacity_Bps == (5e9,) * 6
    routes = {(s, d): network.route(s, d) for s in range(3) for d in range(3) if s != d}
    assert all(latency == 2e-6 for latency, _ in routes.values())
    out_of = {s: {links[0] for (src, _), (_, links) in routes.items() if src == s}
              for s in range(3)}
    into = {d: {links[1] for (_, dst), (_, links) in routes.items() if dst == d}
            for d in range(3)}
    ports = [*out_of.values(), *into.values()]
    assert all(len(port) == 1 for port in ports)
    assert len(set.union(*ports)) == 6  # a rank sends and receives at once


def test_a_path_leads_from_a_rank_of_the_cluster_to_another() -> None:
    assert uniform(3, 0, 1e9).path(1, 1) == [1]
    with pytest.raises(dtlab.ConfigError, match="there is no rank 3; ranks are 0 to 2"):
        uniform(3, 0, 1e9).path(0, 3)


def test_the_graph_tells_the_same_as_the_routes() -> None:
    network = uniform(4, 2e-6, 5e9)
    graph = network.graph()
    assert isinstance(graph, nx.DiGraph)
    for src in range(4):
        for dst in range(4):
            if src != dst:
                path = nx.shortest_path(graph, src, dst)
                edges = [graph.edges[edge] for edge in nx.utils.pairwise(path)]
                assert math.isclose(sum(e["latency_s"] for e in edges), network.route(src, dst)[0])
                assert min(e["bandwidth_Bps"] for e in edges) == 5e9


def test_it_introduces_itself_in_units_for_people() -> None:
    assert repr(uniform(4, 5e-6, 10e9)) == \
        "<Topology uniform(4 ranks, 5 µs, 10 GB/s): 4 ranks, 8 links>"


@pytest.mark.parametrize(("ranks", "latency_s", "bandwidth_Bps", "says"), [
    *((ranks, 0, 1, "ranks must be") for ranks in (0, -1, 3.5, "4", None, True, float("nan"))),
    (2, -1e-9, 1, "latency_s.*0 or more"), (2, math.inf, 1, "latency_s.*finite"),
    (2, math.nan, 1, "latency_s.*number"), (2, "5us", 1, "latency_s.*'5us'"),
    (2, None, 1, "latency_s"), (2, True, 1, "latency_s"),
    (2, 0, 0, "bandwidth_Bps"), (2, 0, -1, "bandwidth_Bps"),
    (2, 0, math.nan, "bandwidth_Bps.*number"), (2, 0, True, "bandwidth_Bps.*True"),
])
def test_numbers_that_no_network_has_are_refused(
    ranks: Any, latency_s: Any, bandwidth_Bps: Any, says: str
) -> None:
    with pytest.raises(dtlab.ConfigError, match=says):
        uniform(ranks, latency_s, bandwidth_Bps)


def test_numbers_of_numpy_and_an_endless_bandwidth_are_fine() -> None:
    import numpy as np

    assert uniform(np.int64(2), np.float32(0.5), np.int32(10)).capacity_Bps == (10.0,) * 4
    assert uniform(1, 0, math.inf).capacity_Bps == (math.inf,) * 2
