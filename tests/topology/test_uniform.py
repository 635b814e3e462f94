"""A topology is a description: the simulator, the plots and the planner read the same one."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import pytest

import dtlab
from dtlab.topology import uniform


def test_a_path_leads_from_a_rank_over_two_ports_to_another() -> None:
    network = uniform(3, 2e-6, 5e9)
    assert network.path(1, 1) == [1]
    assert network.capacity_Bps == (5e9,) * 6
    graph = network.graph()
    for src, dst in permutations(range(3), 2):
        assert network.path(src, dst) == [src, "switch", dst]
        latency_s, links = network.route(src, dst)
        edges = [network.ends(link) for link in links]
        assert edges == [(src, "switch"), ("switch", dst)]
        assert sum(graph.edges[edge]["latency_s"] for edge in edges) == latency_s == 2e-6
        assert [graph.edges[edge]["bandwidth_Bps"] for edge in edges] == [5e9, 5e9]
    with pytest.raises(dtlab.ConfigError, match="there is no rank 3; ranks are 0 to 2"):
        network.path(0, 3)


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
