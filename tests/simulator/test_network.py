"""Flows that share links: the rates are max–min fair at every moment, however they came about."""

from __future__ import annotations

import math
from fractions import Fraction

import networkx as nx
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtlab import Comm, Recv, Send, simulate
from dtlab.simulator.network import Flow, Network, fair_rates
from dtlab.topology import Topology, uniform


class SomeFlow(Flow):
    def __init__(self, links: tuple[int, ...], nbytes: float = 1.0):
        self.links, self.remaining = links, nbytes


def cluster(ranks: int, routes: dict[tuple[int, int], tuple[int, ...]],
            capacity_Bps: tuple[float, ...], latency_s: float = 0.0) -> Topology:
    return Topology("by hand", ranks, capacity_Bps,
                    lambda src, dst: (latency_s, routes[src, dst]), nx.DiGraph)


def brute_force_rates(links: list[tuple[int, ...]], capacity: list[int]) -> list[Fraction]:
    """All rates grow together, exactly, until a link is full; its flows stop, the rest goes on."""
    rates = [Fraction(0)] * len(links)
    growing = set(range(len(links)))
    while growing:
        room = {
            link: (free - sum(rates[f] for f, on in enumerate(links) if link in on)) / count
            for link, free in enumerate(map(Fraction, capacity))
            if (count := sum(link in links[f] for f in growing))
        }
        step = min(room.values())
        for f in growing:
            rates[f] += step
        full = {link for link, more in room.items() if more == step}
        growing = {f for f in growing if full.isdisjoint(links[f])}
    return rates


routes_over_five_links = st.lists(
    st.sets(st.integers(0, 4), min_size=1, max_size=4).map(lambda s: tuple(sorted(s))),
    min_size=1, max_size=9)
capacities = st.lists(st.integers(1, 12), min_size=5, max_size=5)


@given(routes_over_five_links, capacities)
def test_rates_equal_those_of_a_brute_force_filling(
    links: list[tuple[int, ...]], capacity: list[int]
) -> None:
    flows = [SomeFlow(each) for each in links]
    rates = fair_rates(flows, tuple(map(float, capacity)))
    for flow, exact in zip(flows, brute_force_rates(links, capacity), strict=True):
        assert math.isclose(rates[flow], exact, rel_tol=1e-9)


@given(routes_over_five_links, capacities, st.data())
def test_rates_are_fair_after_every_start_and_end(
    links: list[tuple[int, ...]], capacity: list[int], data: st.DataObject
) -> None:
    """The network recomputes as little as it can; this compares with computing all of it."""
    topology = cluster(2, {}, tuple(map(float, capacity)))
    network, moving = Network(topology), []
    waiting = [SomeFlow(each) for each in links]
    for _ in range(2 * len(links)):
        if waiting and (not moving or data.draw(st.booleans())):
            batch = [waiting.pop() for _ in range(data.draw(st.integers(1, len(waiting))))]
            network.start(batch, 0.0)
            moving += batch
        elif moving:
            chosen = data.draw(st.sampled_from(moving))
            moving.remove(chosen)
            assert network.end([chosen, chosen], chosen.end_s) == [chosen]
        network.settle(0.0)
        wanted = fair_rates(moving, topology.capacity_Bps)
        for flow in moving:
            assert math.isclose(flow.rate_Bps, wanted[flow], rel_tol=1e-9)


def bytes_(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.uint8)


def test_two_servers_of_10_gbit_into_one_10_gbit_uplink_take_twice_as_long() -> None:
    # Links 0, 1: out of the servers; 2: the uplink; 3, 4: into the receivers; 1.25 GB/s each.
    routes = {(0, 2): (0, 2, 3), (1, 3): (1, 2, 4)}
    network = cluster(4, routes, (1.25e9,) * 5)

    def fn(comm: Comm, both: bool) -> float:
        if comm.rank == 0 or (comm.rank == 1 and both):
            comm.send(bytes_(1250), comm.rank + 2)
        elif comm.rank == 2 or (comm.rank == 3 and both):
            comm.recv(bytes_(1250), comm.rank - 2)
        return comm.now()

    assert math.isclose(simulate(fn, False, network=network).elapsed_s, 1e-6)
    assert math.isclose(simulate(fn, True, network=network).elapsed_s, 2e-6)


def test_a_flow_held_back_elsewhere_leaves_its_share_to_the_others() -> None:
    # Two flows cross link 0 (12 B/s), but one of them is held to 2 B/s by link 1: 10 are left.
    network = cluster(4, {(0, 1): (0, 1), (2, 3): (0,)}, (12.0, 2.0))

    def fn(comm: Comm) -> float:
        if comm.rank in (0, 2):
            comm.send(bytes_(20 if comm.rank == 0 else 100), comm.rank + 1)
        else:
            comm.recv(bytes_(20 if comm.rank == 1 else 100), comm.rank - 1)
        return comm.now()

    assert simulate(fn, network=network).values == [10.0] * 4


def test_three_flows_on_a_line_the_long_one_gets_least() -> None:
    # Bertsekas & Gallager's picture: one flow over both links, one on each; capacity 1 and 2.
    flows = [SomeFlow((0, 1)), SomeFlow((0,)), SomeFlow((1,))]
    assert list(fair_rates(flows, (1.0, 2.0)).values()) == [0.5, 0.5, 1.5]


def test_latency_is_paid_once_and_a_route_without_links_costs_nothing_more() -> None:
    network = cluster(2, {(0, 1): ()}, (), latency_s=0.25)
    values = simulate(lambda comm: (comm.send(bytes_(9), 1) if comm.rank == 0
                                    else comm.recv(bytes_(9), 0), comm.now())[1],
                      network=network).values
    assert values == [0.25, 0.25]


def test_sixteen_into_one_share_evenly_and_all_bytes_arrive() -> None:
    def fn(comm: Comm) -> float:
        if comm.rank:
            comm.send(bytes_(100 * comm.rank), 0)
        else:
            comm.exchange(*[Recv(bytes_(100 * src), src) for src in range(1, comm.size)])
        return comm.now()

    result = simulate(fn, network=uniform(17, 0.0, 100.0))
    assert math.isclose(result.elapsed_s, sum(range(17)))  # the port was never idle
    ends = {m.src: m.end_s for m in result.trace.transfers}
    so_far = 0.0
    for src in range(1, 17):  # each step: what the next larger one has more, times those left
        so_far += 17 - src
        assert math.isclose(ends[src], so_far)


def test_sends_from_one_port_share_it() -> None:
    def fn(comm: Comm) -> float:
        if comm.rank == 0:
            comm.exchange(Send(bytes_(100), 1), Send(bytes_(100), 2))
        else:
            comm.recv(bytes_(100), 0)
        return comm.now()

    assert simulate(fn, network=uniform(3, 1.0, 100.0), overhead_s=0).values == [3.0] * 3
