"""Rates worked out from a trace: they are those that the simulation had."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtlab
from dtlab import Comm, Trace, simulate, topology
from dtlab.errors import ConfigError
from dtlab.simulator import Stretch, replay
from dtlab.topology import Topology, link_bytes, racks, send_together, with_link, with_traffic

CLUSTERS = ["uniform:6,latency_s=1us,bandwidth_Bps=1GB/s", "pcie_server:6x2", "v100_nvlink",
            "racks:2x3", "fat_tree:4", "torus:3x3", "nvswitch:4@racks:2x2"]


def unequal(comm: Comm) -> None:
    p = comm.size
    flows = {(src, (src + hop) % p): 1000 * (src + 1) * hop for src in range(p) for hop in (1, 2)}
    send_together(comm, flows)


def ring(comm: Comm) -> None:
    dtlab.collectives.all_reduce(comm, torch.empty(1000, device="meta"), algorithm="ring")


def staggered(comm: Comm) -> None:
    with comm.compute("wait", seconds=1e-6 * comm.rank):
        pass
    unequal(comm)


def carried_bytes(cluster: Topology, stretches: list[Stretch]) -> dict[Any, float]:
    carried = dict.fromkeys(range(len(cluster.capacity_Bps)), 0.0)
    for stretch in stretches:
        for link, rate_Bps in stretch.link_rates.items():
            carried[link] += rate_Bps * (stretch.end_s - stretch.start_s)
    return {cluster.ends(link): nbytes for link, nbytes in carried.items()}


@pytest.mark.parametrize("traffic", [unequal, ring, staggered])
@pytest.mark.parametrize("name", CLUSTERS)
def test_rates_times_time_are_the_bytes_on_every_link(name: str, traffic: Any) -> None:
    cluster = topology.named(name)
    trace = simulate(traffic, network=cluster).trace
    stretches = replay(cluster, trace)
    assert carried_bytes(cluster, stretches) == pytest.approx(link_bytes(cluster, trace), abs=1e-3)


@pytest.mark.parametrize("name", CLUSTERS)
def test_stretches_cover_the_run_without_gaps_and_no_link_carries_more_than_it_can(
    name: str,
) -> None:
    cluster = topology.named(name)
    result = simulate(staggered, network=cluster)
    stretches = replay(cluster, result.trace)
    edges = [stretches[0].start_s, *(s.end_s for s in stretches)]
    assert edges[0] == 0
    assert edges[-1] == pytest.approx(result.elapsed_s)
    assert [s.start_s for s in stretches] == edges[:-1]
    for stretch in stretches:
        for link, rate_Bps in stretch.link_rates.items():
            assert rate_Bps <= cluster.capacity_Bps[link] * (1 + 1e-9)


def test_when_one_flow_ends_the_other_speeds_up() -> None:
    cluster = racks(2, 2, oversubscription=2, latency_s=0, bandwidth_Bps=1e9)
    trace = simulate(send_together, {(0, 2): 10**9, (1, 3): 2 * 10**9}, network=cluster).trace
    both, alone = replay(cluster, trace)
    assert [(f.message.src, f.rate_Bps) for f in both.moving] == [(0, 5e8), (1, 5e8)]
    assert [(f.message.src, f.rate_Bps) for f in alone.moving] == [(1, 1e9)]
    assert (both.end_s, alone.end_s) == (2, 3)
    uplink = next(n for n in range(12) if cluster.ends(n) == ("rack0", "spine"))
    assert both.loads[uplink] == alone.loads[uplink] == 1
    assert sorted(both.loads.values()) == [0.5] * 4 + [1] * 2


def test_before_its_latency_has_passed_a_message_is_on_no_link() -> None:
    cluster = racks(2, 1, latency_s=0.25, bandwidth_Bps=1e9)
    trace = simulate(send_together, {(0, 1): 10**9}, network=cluster).trace
    waiting, moving = replay(cluster, trace)
    assert (waiting.start_s, waiting.end_s, waiting.loads) == (0, 1.0, {})
    assert len(moving.moving) == 1


def changing() -> Topology:
    cluster = racks(2, 2, oversubscription=2, latency_s=0.01, bandwidth_Bps=1e9)
    cluster = with_link(cluster, "rack0", "spine", bandwidth_Bps=0, at_s=0.5)
    cluster = with_link(cluster, "rack0", "spine", bandwidth_Bps=2e9, latency_s=0.2, at_s=1.5)
    return with_traffic(cluster, 0, 2, 0.25e9, start_s=1.75, end_s=2.0)


def twice(comm: Comm) -> None:
    for _ in range(2):
        send_together(comm, {(0, 2): 10**9, (1, 3): 2 * 10**9})


def test_links_that_fail_come_back_and_carry_others_are_replayed_as_they_were() -> None:
    cluster = changing()
    result = simulate(twice, network=cluster)
    stretches = replay(cluster, result.trace)
    assert stretches[-1].end_s == pytest.approx(result.elapsed_s)
    assert carried_bytes(cluster, stretches) == pytest.approx(
        link_bytes(cluster, result.trace), abs=1)
    down = [s for s in stretches if any(c == 0 for c in s.capacity_Bps)]
    assert [(s.start_s, s.end_s) for s in down] == [(0.5, 1.5)]
    assert all(f.rate_Bps == 0 for f in down[0].moving)
    assert set(down[0].loads.values()) == {0.0}


def test_messages_sent_eagerly_are_replayed_when_they_moved() -> None:
    def late(comm: Comm) -> None:
        x = torch.empty(10**6, device="meta", dtype=torch.uint8)
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            with comm.compute("work", seconds=5.0):
                pass
            comm.recv(x, 0)

    cluster = topology.uniform(2, 0.0, 1e6)
    trace = simulate(late, network=cluster, eager_bytes=1 << 30).trace
    (stretch,) = replay(cluster, trace)
    assert (stretch.start_s, stretch.end_s) == (0, 1)


def test_nothing_happened_is_no_stretch() -> None:
    assert replay(racks(2, 2), Trace(4, virtual=True)) == []


def test_traces_that_have_no_rates_here_are_refused_in_one_sentence() -> None:
    fast, slow = racks(2, 2), racks(2, 2, oversubscription=8)
    trace = simulate(send_together, {(0, 2): 1000, (1, 3): 1000}, network=fast).trace
    with pytest.raises(ConfigError, match=r"not from racks.*would not have arrived at"):
        replay(slow, trace)
    with pytest.raises(ConfigError, match="the trace is measured"):
        replay(fast, Trace(4, virtual=False))
    with pytest.raises(ConfigError, match="of 3 ranks"):
        replay(fast, Trace(3, virtual=True))
