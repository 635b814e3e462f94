"""Virtual time: flows that share links, compute, γ, and the same trace for the same input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtlab import Comm, Recv, Send, simulate, topology
from dtlab.collectives import ALGORITHMS, all_reduce
from dtlab.simulator.network import Flow, fair_rates


def bytes_(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.uint8)


def test_a_message_alone_takes_alpha_plus_n_beta() -> None:
    def fn(comm: Comm) -> float:
        comm.send(bytes_(100), 1) if comm.rank == 0 else comm.recv(bytes_(100), 0)
        return comm.now()

    assert simulate(fn, network=topology.uniform(2, 3.0, 50.0)).values == [5.0, 5.0]


def test_a_port_sends_and_receives_at_once() -> None:
    def fn(comm: Comm) -> None:
        comm.sendrecv(bytes_(100), 1 - comm.rank, bytes_(100), 1 - comm.rank)

    assert simulate(fn, network=topology.uniform(2, 3.0, 50.0)).elapsed_s == 5.0


def test_two_flows_into_one_port_take_twice_as_long_and_speed_up_when_one_ends() -> None:
    def fn(comm: Comm) -> float:
        if comm.rank == 2:
            comm.exchange(Recv(bytes_(100), 0), Recv(bytes_(300), 1))
        else:
            comm.send(bytes_(100 if comm.rank == 0 else 300), 2)
        return comm.now()

    # Both at 50 B/s until 2 s; then the longer one has 200 bytes to go, at 100 B/s.
    assert simulate(fn, network=topology.uniform(3, 0.0, 100.0)).values == [2.0, 4.0, 4.0]


def test_a_flow_that_joins_later_slows_the_first_from_then_on() -> None:
    def fn(comm: Comm) -> float:
        if comm.rank == 1:
            with comm.compute("first something else", seconds=1.0):
                pass
        if comm.rank == 2:
            comm.exchange(Recv(bytes_(200), 0), Recv(bytes_(100), 1))
        else:
            comm.send(bytes_(200 if comm.rank == 0 else 100), 2)
        return comm.now()

    # 0 s: 100 B/s; from 1 s: 50 each, 100 bytes left on both: both end at 3 s.
    assert simulate(fn, network=topology.uniform(3, 0.0, 100.0)).values == [3.0, 3.0, 3.0]


class SomeFlow(Flow):
    def __init__(self, links: tuple[int, ...]):
        self.links = links
        self.rate_Bps = 0.0
        self.remaining = 1.0
        self.end_s = -1.0


@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=6), st.data())
def test_rates_are_max_min_fair(capacities: list[float], data: st.DataObject) -> None:
    """No link is overfull, and every flow has a full link on which nobody gets more than it."""
    subsets = st.sets(st.integers(0, len(capacities) - 1), min_size=1).map(tuple)
    flows = [SomeFlow(links) for links in data.draw(st.lists(subsets, min_size=1, max_size=8))]
    rates = fair_rates(flows, tuple(capacities))
    load = [sum(rates[f] for f in flows if link in f.links) for link in range(len(capacities))]
    for link, capacity in enumerate(capacities):
        assert load[link] <= capacity * (1 + 1e-9)
    for flow in flows:
        assert any(
            math.isclose(load[link], capacities[link], rel_tol=1e-9)
            and all(rates[other] <= rates[flow] * (1 + 1e-9)
                    for other in flows if link in other.links)
            for link in flow.links
        )


def test_compute_and_gamma_take_virtual_time_and_leave_spans() -> None:
    def fn(comm: Comm) -> float:
        with comm.compute("forward", seconds=2.0):
            pass
        comm.accumulate_(torch.zeros(10), torch.ones(10))
        return comm.now()

    result = simulate(fn, network=topology.uniform(2, 1, 1), gamma=0.1)
    assert result.values == [6.0, 6.0]  # 2 s + 40 bytes at 0.1 s
    assert [(s.rank, s.kind, s.start_s, s.end_s) for s in result.trace.spans] == [
        (0, "compute", 0.0, 2.0), (1, "compute", 0.0, 2.0),
        (0, "reduce", 2.0, 6.0), (1, "reduce", 2.0, 6.0),
    ]


def test_elapsed_time_is_when_the_last_rank_returned() -> None:
    """A flow that was planned to end later, before others made way, must not count."""
    def fn(comm: Comm) -> float:
        if comm.rank == 0:
            comm.exchange(Send(bytes_(8), 1), Send(bytes_(0), 2))
        else:
            comm.recv(bytes_(8 if comm.rank == 1 else 0), 0)
        return comm.now()

    result = simulate(fn, network=topology.uniform(3, 1.0, 1.0))
    assert result.elapsed_s == max(result.values) == 9.0


@pytest.mark.parametrize("strands", ["greenlet", "thread"])
def test_equal_inputs_give_equal_traces_bit_for_bit(strands: str) -> None:
    def fn(comm: Comm) -> torch.Tensor:
        torch.manual_seed(comm.rank)
        x = torch.randn(37)
        for algorithm in ALGORITHMS["all_reduce"]:
            all_reduce(comm, x, algorithm=algorithm)
        return x

    network = topology.uniform(6, 1.1e-6, 3.3e9)
    first = simulate(fn, network=network, strands="greenlet", gamma=1e-10)
    again = simulate(fn, network=network, strands=strands, gamma=1e-10)
    assert first.trace.events == again.trace.events
    assert first.elapsed_s == again.elapsed_s
    assert all(torch.equal(a, b) for a, b in zip(first.values, again.values, strict=True))


def test_a_large_ring_without_data_sends_what_it_should() -> None:
    p = 128
    result = simulate(lambda comm: all_reduce(comm, torch.empty(p * 10, device="meta")) and None
                      if False else all_reduce(comm, torch.empty(p * 10, device="meta")).is_meta,
                      network=topology.uniform(p, 1e-5, 1e9))
    assert result.values == [True] * p
    assert result.trace.messages() == 2 * p * (p - 1)
    assert result.trace.sent_bytes(5) == 2 * (p - 1) * 40
