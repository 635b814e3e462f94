"""Links that messages share, that change while messages are on them, fail, come back, or carry
others' traffic."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import dtlab
from dtlab import Comm, topology
from dtlab.topology import Topology, compose, nvswitch, racks, save, torus, with_link, with_traffic

SPEED_BPS = 1e9
N = 10**9  # bytes: a second on an idle link


def rack(latency_s: float = 0.0) -> Topology:
    """Two racks of two hosts, 1 GB/s everywhere, also out of a rack."""
    return racks(2, 2, oversubscription=2, latency_s=latency_s, bandwidth_Bps=SPEED_BPS)


def end_s(cluster: Topology, *flows: tuple[int, int], start_s: float = 0.0,
          nbytes: int = N) -> list[float]:
    """When messages of `nbytes` for each (src, dst) have arrived, all sent at `start_s`."""

    def fn(comm: Comm) -> None:
        with comm.compute("wait", seconds=start_s):
            pass
        x = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        comm.exchange(*[dtlab.Send(x, dst) for src, dst in flows if src == comm.rank],
                      *[dtlab.Recv(x, src) for src, dst in flows if dst == comm.rank])

    arrived = {(m.src, m.dst): m.end_s
               for m in dtlab.simulate(fn, network=cluster).trace.transfers}
    return [arrived[flow] for flow in flows]


@pytest.mark.parametrize(("latency_s", "flows", "ends"), [
    (0, [(0, 2), (1, 3)], [2, 2]),  # two servers into one uplink
    (0, [(0, 2), (2, 0)], [1, 1]),  # the two directions of a link do not slow each other
    (1e-3, [(0, 3)], [1 + 4e-3])])  # all links' latencies come before the bytes
def test_messages_share_links_as_on_wires(
        latency_s: float, flows: list[tuple[int, int]], ends: list[float]) -> None:
    assert end_s(rack(latency_s), *flows) == pytest.approx(ends)


def ring(comm: Comm, elements: int) -> None:
    x = torch.empty(elements, device="meta")
    dtlab.collectives.all_reduce(comm, x, algorithm="ring")


def test_a_ring_of_servers_is_bound_by_its_slowest_link() -> None:
    cluster = compose(nvswitch(4), racks(1, 2, bandwidth_Bps=1e9, latency_s=0), nic_latency_s=0)
    took_s = dtlab.simulate(ring, 8 * 10**6, network=cluster).elapsed_s
    assert took_s == pytest.approx(2 * 7 / 8 * 32e6 / 1e9, rel=0.01)


def test_a_link_that_slows_down_or_speeds_up_does_so_for_all_messages_on_it() -> None:
    slow = with_link(rack(), "rack0", "spine", bandwidth_Bps=SPEED_BPS / 4, at_s=0.5)
    assert end_s(slow, (0, 2)) == pytest.approx([0.5 + 0.5 * 4])
    assert end_s(slow, (0, 1)) == pytest.approx([1])  # not over that link
    one_way = with_link(rack(), "rack0", "spine", bandwidth_Bps=SPEED_BPS / 2, both_ways=False,
                        at_s=1e-9)
    assert end_s(one_way, (0, 2), (3, 1)) == pytest.approx([2, 1])
    fast = with_link(rack(), "rack0", "spine", bandwidth_Bps=2 * SPEED_BPS, at_s=1.0)
    fast = with_link(fast, "rack1", "spine", bandwidth_Bps=2 * SPEED_BPS, at_s=1.0)
    assert end_s(fast, (0, 2), (1, 3)) == pytest.approx([1.5, 1.5])


def test_of_two_changes_at_one_moment_the_later_given_counts() -> None:
    for first, last, wanted_s in ((0.25, 0.5, 1.5), (0.5, 0.25, 2.5), (0, 0.5, 1.5)):
        changed = with_link(rack(), "rack0", "spine", bandwidth_Bps=first * SPEED_BPS, at_s=0.5)
        changed = with_link(changed, "rack0", "spine", bandwidth_Bps=last * SPEED_BPS, at_s=0.5)
        assert end_s(changed, (0, 2)) == pytest.approx([wanted_s])


def test_messages_wait_for_a_failed_link_until_it_works_again() -> None:
    broken = with_link(rack(), "rack0", "spine", bandwidth_Bps=0, at_s=0.25)
    mended = with_link(broken, "rack0", "spine", bandwidth_Bps=SPEED_BPS, at_s=10)
    assert end_s(mended, (0, 2)) == pytest.approx([10.75])
    assert end_s(mended, (0, 2), (1, 3)) == pytest.approx([11.75, 11.75])
    assert end_s(mended, (0, 2), start_s=5) == pytest.approx([11])  # started while it is down
    assert end_s(mended, (0, 2), start_s=5, nbytes=0) == pytest.approx([10])


def test_a_message_on_a_link_that_stays_broken_is_a_deadlock() -> None:
    broken = with_link(rack(), "rack0", "spine", bandwidth_Bps=0, at_s=0.25)
    with pytest.raises(dtlab.Deadlock, match="wait for a link that has failed: rack0 → spine\n"):
        end_s(broken, (0, 2))
    assert end_s(broken, (0, 1)) == pytest.approx([1])


def test_latency_changes_for_messages_that_start_later() -> None:
    later = with_link(rack(1e-3), 0, "rack0", latency_s=5e-3, at_s=0.5)
    assert end_s(later, (0, 1), nbytes=0) == pytest.approx([2e-3])
    assert end_s(later, (0, 1), nbytes=0, start_s=1) == pytest.approx([1 + 6e-3])
    again = with_link(later, 0, "rack0", latency_s=1e-3, at_s=0.7)
    assert end_s(again, (0, 1), nbytes=0, start_s=0.6) == pytest.approx([0.6 + 6e-3])
    assert end_s(again, (0, 1), nbytes=0, start_s=1) == pytest.approx([1 + 2e-3])


def test_latency_changes_on_a_channel_in_use() -> None:
    later = with_link(rack(1e-3), 0, "rack0", latency_s=5e-3, at_s=0.5)

    def twice(comm: Comm) -> None:
        for _ in range(2):
            if comm.rank < 2:
                comm.sendrecv(torch.empty(0), 1 - comm.rank, torch.empty(0), 1 - comm.rank)
            with comm.compute("wait", seconds=1):
                pass

    ends = [m.end_s for m in dtlab.simulate(twice, network=later).trace.transfers]
    assert ends == pytest.approx([2e-3, 2e-3, 1.002 + 6e-3, 1.002 + 6e-3])


def test_changes_from_the_start_are_part_of_the_cluster() -> None:
    slow = with_link(rack(1e-3), "rack0", "spine", bandwidth_Bps=SPEED_BPS / 4, latency_s=3e-3)
    assert slow.changes == ()
    assert slow.graph().edges["spine", "rack0"] == {"bandwidth_Bps": SPEED_BPS / 4,
                                                    "latency_s": 3e-3}
    assert slow.route(0, 2)[0] == pytest.approx(6e-3)
    assert end_s(slow, (0, 2)) == pytest.approx([4 + 6e-3])
    assert rack().graph().edges["spine", "rack0"]["bandwidth_Bps"] == SPEED_BPS


def test_routes_avoid_links_that_failed_from_the_start() -> None:
    cluster = torus(4, 4)
    for a, b in [(0, 1), (5, 1), (0, 4)]:
        cluster = with_link(cluster, a, b, bandwidth_Bps=0)
    dead = {frozenset(pair) for pair in [(0, 1), (5, 1), (0, 4)]}
    for src in range(16):
        for dst in range(16):
            path = cluster.path(src, dst)
            assert (path[0], path[-1]) == (src, dst)
            assert not dead & {frozenset(hop) for hop in itertools.pairwise(path)}
            if src != dst:
                edges = [cluster.ends(link) for link in cluster.route(src, dst)[1]]
                assert edges == list(itertools.pairwise(path))
    assert not cluster.graph().has_edge(0, 1)


def test_others_traffic_takes_its_rate_from_each_link_of_its_route() -> None:
    busy = with_traffic(rack(), 1, 3, SPEED_BPS / 2)
    assert end_s(busy, (0, 2)) == pytest.approx([2])
    assert end_s(busy, (2, 0)) == pytest.approx([1])  # the other direction is free
    for_a_while = with_traffic(rack(), 1, 3, SPEED_BPS / 2, start_s=0.5, end_s=1.0)
    assert end_s(for_a_while, (0, 2)) == pytest.approx([1.25])
    twice = with_traffic(with_traffic(rack(), 1, 3, 0.25e9), 1, 2, 0.25e9, end_s=1)
    assert end_s(twice, (0, 3)) == pytest.approx([1 + 0.5 / 0.75])
    full = with_traffic(rack(), 1, 3, 5 * SPEED_BPS, end_s=3)
    assert end_s(full, (0, 2)) == pytest.approx([4])  # nothing is left until it ends


def test_a_run_over_changing_links_is_the_same_every_time() -> None:
    cluster = with_traffic(torus(4, 4, bandwidth_Bps=1e9), 0, 10, 0.7e9, start_s=1e-4, end_s=1e-2)
    cluster = with_link(cluster, 4, 5, bandwidth_Bps=0.3e9, latency_s=2e-6, at_s=1e-3)
    one, other = (dtlab.simulate(ring, 10**6, network=cluster) for _ in range(2))
    assert one.elapsed_s == other.elapsed_s
    assert list(one.trace.transfers) == list(other.trace.transfers)
    still = dtlab.simulate(ring, 10**6, network=torus(4, 4, bandwidth_Bps=1e9))
    assert one.elapsed_s > still.elapsed_s


def test_a_uniform_cluster_may_change_too() -> None:
    slow = with_link(topology.uniform(3, 1e-6, 1e9), 0, "switch", bandwidth_Bps=0.5e9)
    assert end_s(slow, (0, 1), (1, 2)) == pytest.approx([2 + 1e-6, 1 + 1e-6])


@pytest.mark.parametrize(("change", "says"), [
    (lambda: with_link(rack(), 0, 1, bandwidth_Bps=1), "no link from 0 to 1"),
    (lambda: with_link(rack(), 0, "rack0", bandwidth_Bps=-1), "bandwidth_Bps must be"),
    (lambda: with_link(rack(), 0, "rack0", latency_s=-1), "latency_s must be"),
    (lambda: with_link(rack(), 0, "rack0", bandwidth_Bps=1, at_s=-1), "at_s must be 0 seconds"),
    (lambda: with_link(rack(), 0, "rack0", bandwidth_Bps=0), "no way from rank 0 to rank 1"),
    (lambda: with_traffic(rack(), 0, 4, 1e9), "no rank 4; ranks are 0 to 3"),
    (lambda: with_traffic(rack(), 0, 1, 0), "rate_Bps must be a number above 0"),
    (lambda: with_traffic(rack(), 0, 1, 1e9, start_s=2, end_s=2), "end_s must be a time after"),
    (lambda: compose(nvswitch(2), with_traffic(rack(), 0, 1, 1)), "compose .* first"),
    (lambda: save(with_traffic(rack(), 0, 1, 1), "x.yaml"), "save it first"),
])
def test_changes_that_make_no_sense_are_refused(change: Any, says: str) -> None:
    with pytest.raises(dtlab.ConfigError, match=says):
        change()
