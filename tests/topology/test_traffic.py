"""What crossed each link: the bytes of a run on the links of a cluster."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch

import dtlab
from dtlab import Trace, topology
from dtlab.errors import ConfigError
from dtlab.topology import Topology, link_bytes

CLUSTERS = ["uniform:4,latency_s=1us,bandwidth_Bps=1GB/s", "pcie_server", "v100_nvlink",
            "nvswitch:5", "racks:2x3", "racks:2x2,gpus=2", "fat_tree:4", "torus:3x3",
            "dragonfly:3x2x1", "nvswitch:4@racks:2x2"]


def ring(comm: dtlab.Comm) -> None:
    dtlab.collectives.all_reduce(comm, torch.empty(9 * 16, device="meta"), algorithm="ring")


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_link_carried_what_the_messages_over_it_carried(name: str) -> None:
    cluster = topology.named(name)
    trace = dtlab.simulate(ring, network=cluster).trace
    wanted: Counter[tuple[topology.Node, topology.Node]] = Counter()
    for message in trace.transfers:  # along the nodes, which routes don't know
        for edge in pairwise(cluster.path(message.src, message.dst)):
            wanted[edge] += message.nbytes
    crossed = link_bytes(cluster, trace)
    assert crossed.keys() == set(cluster.graph().edges)
    assert {link: nbytes for link, nbytes in crossed.items() if nbytes} == wanted


def test_failed_links_carry_nothing_and_detours_do() -> None:
    cluster: Topology = topology.with_link(topology.torus(4, 4), 0, 1, bandwidth_Bps=0)
    trace = Trace(16, [(0, 1, 10, 0, 0, 0, 1, "")])
    crossed = link_bytes(cluster, trace)
    assert crossed[0, 1] == 0
    assert [crossed[edge] for edge in pairwise(cluster.path(0, 1))] == [10, 10, 10]


def test_a_measured_trace_says_what_it_would_put_on_the_links() -> None:
    measured = Trace(4, [(0, 3, 5, 0.0, 0.1, 0.1, 0.2, "")], virtual=False)
    assert link_bytes(topology.racks(2, 2), measured)["spine", "rack1"] == 5


def test_a_trace_of_other_ranks_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"of 3 ranks, but racks.* has 4"):
        link_bytes(topology.racks(2, 2), Trace(3))
