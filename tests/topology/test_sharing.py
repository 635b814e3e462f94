"""Messages over a simulated cluster share its links as the wires would."""

from __future__ import annotations

import pytest
import torch

import dtlab
from dtlab import Comm, topology

TEN_GIGABIT_BPS = 10e9 / 8


def ends_s(cluster: topology.Topology, flows: dict[tuple[int, int], int]) -> list[float]:
    """When each of these messages, (src, dst) → bytes, has arrived, all started at 0."""

    def fn(comm: Comm) -> None:
        comm.exchange(*[
            op for (src, dst), nbytes in flows.items()
            for op in ([dtlab.Send(torch.empty(nbytes, dtype=torch.uint8, device="meta"), dst)]
                       if comm.rank == src else
                       [dtlab.Recv(torch.empty(nbytes, dtype=torch.uint8, device="meta"), src)]
                       if comm.rank == dst else [])
        ])

    trace = dtlab.simulate(fn, network=cluster).trace
    arrived = {(m.src, m.dst): m.end_s for m in trace.transfers}
    return [arrived[flow] for flow in flows]


def rack(latency_s: float = 0.0) -> topology.Topology:
    """Two racks of two servers with 10 Gb/s each, and 10 Gb/s out of each rack."""
    return topology.racks(2, 2, oversubscription=2, latency_s=latency_s,
                          bandwidth_Bps=TEN_GIGABIT_BPS)


def test_two_servers_into_one_uplink_take_twice_the_time() -> None:
    n = 10**6
    (alone,) = ends_s(rack(), {(0, 2): n})
    assert alone == pytest.approx(n / TEN_GIGABIT_BPS)
    assert ends_s(rack(), {(0, 2): n, (1, 3): n}) == pytest.approx([2 * alone, 2 * alone])


def test_when_one_ends_the_other_speeds_up() -> None:
    n = 10**6
    unit_s = n / TEN_GIGABIT_BPS
    assert ends_s(rack(), {(0, 2): n, (1, 3): 2 * n}) == pytest.approx([2 * unit_s, 3 * unit_s])


def test_the_two_directions_of_a_link_do_not_slow_each_other() -> None:
    n = 10**6
    assert ends_s(rack(), {(0, 2): n, (2, 0): n}) == pytest.approx([n / TEN_GIGABIT_BPS] * 2)


def test_latencies_of_all_links_come_before_the_bytes() -> None:
    assert ends_s(rack(1e-3), {(0, 3): 1250}) == pytest.approx([4e-3 + 1e-6])


def test_a_ring_of_servers_is_bound_by_its_slowest_link() -> None:
    cluster = topology.compose(
        topology.nvswitch(4), topology.racks(1, 2, bandwidth_Bps=1e9, latency_s=0),
        nic_latency_s=0)

    def ring(comm: Comm) -> None:
        dtlab.collectives.all_reduce(comm, torch.empty(8 * 10**6, device="meta"), algorithm="ring")

    result = dtlab.simulate(ring, network=cluster)
    assert result.elapsed_s == pytest.approx(2 * 7 / 8 * 32e6 / 1e9, rel=0.01)
