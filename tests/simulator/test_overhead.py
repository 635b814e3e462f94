"""A rank starts one message after another: each occupies its sender's port for the overhead."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dtlab import Comm, ConfigError, Recv, Send, simulate
from dtlab.collectives import ALGORITHMS, all_reduce, barrier
from dtlab.simulator import replay
from dtlab.topology import racks, torus, uniform, with_link

ALPHA = 20e-6


def bytes_(n: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.uint8, device="meta")


def to_all(comm: Comm, nbytes: int) -> None:
    """To everyone, and from everyone, in one exchange; each begins with the rank after it."""
    p, me = comm.size, comm.rank
    comm.exchange(*(Send(bytes_(nbytes), (me + hop) % p) for hop in range(1, p)),
                  *(Recv(bytes_(nbytes), (me - hop) % p) for hop in range(1, p)))


def from_root(comm: Comm, nbytes: int) -> None:
    if comm.rank:
        comm.recv(bytes_(nbytes), 0)
    else:
        comm.exchange(*(Send(bytes_(nbytes), dst) for dst in range(1, comm.size)))


@pytest.mark.parametrize("strands", ["greenlet", "thread"])
def test_a_broadcast_in_one_exchange_pays_for_each_message(strands: str) -> None:
    p = 1000 if strands == "greenlet" else 50
    result = simulate(from_root, 4, network=uniform(p, ALPHA, 1e9), strands=strands)
    assert result.elapsed_s == pytest.approx((p - 1) * ALPHA + 4e-9)
    assert result.elapsed_s >= math.ceil(math.log2(p)) * ALPHA  # the bound for one port
    starts_s = sorted(m.start_s for m in result.trace.transfers)
    assert starts_s == pytest.approx([k * ALPHA for k in range(p - 1)])


@pytest.mark.parametrize("p", [2, 3, 8, 64])
def test_a_barrier_in_one_exchange_pays_for_each_message(p: int) -> None:
    elapsed_s = simulate(to_all, 0, network=uniform(p, ALPHA, 1e9)).elapsed_s
    assert elapsed_s == pytest.approx((p - 1) * ALPHA)
    assert elapsed_s >= math.ceil(math.log2(p)) * ALPHA * (1 - 1e-12)


@pytest.mark.parametrize("p", [2, 3, 8])
@pytest.mark.parametrize("nbytes", [0, 1, 10_000, 20_000, 30_000, 1_000_000])
def test_messages_in_rotated_order_overlap_latency_or_bytes_whichever_is_less(
    p: int, nbytes: int
) -> None:
    m = nbytes / 1e9
    elapsed_s = simulate(to_all, nbytes, network=uniform(p, ALPHA, 1e9)).elapsed_s
    assert elapsed_s == pytest.approx(ALPHA + m + (p - 2) * max(ALPHA, m))


@pytest.mark.parametrize("algorithm", ["ring", "tree", "flat", "recursive_doubling",
                                       "halving_doubling"])
@pytest.mark.parametrize("p", [4, 7])
def test_one_message_at_a_time_takes_what_it_took_to_the_bit(algorithm: str, p: int) -> None:
    assert algorithm in ALGORITHMS["all_reduce"]

    def rank(comm: Comm) -> float:
        all_reduce(comm, torch.empty(1001, device="meta"), algorithm=algorithm)
        barrier(comm)
        return comm.now()

    network = uniform(p, 1.1e-6, 3.3e9)
    first, second = (simulate(rank, network=network, gamma=1e-10, overhead_s=o) for o in (None, 0))
    assert first.values == second.values
    assert first.trace.events == second.trace.events


def test_the_port_is_the_ranks_whatever_communicator_it_sends_on() -> None:
    def rank(comm: Comm) -> None:
        pair = comm.subgroup([0, comm.rank]) if comm.rank else None
        if pair is not None:
            pair.recv(bytes_(0), 0)
        else:
            works = [comm.subgroup([0, r]).isend(bytes_(0), 1) for r in (1, 2, 3)]
            for work in works:
                work.wait()

    starts_s = [m.start_s for m in simulate(rank, network=uniform(4, 1.0, 1.0)).trace.transfers]
    assert starts_s == [0, 1, 2]


def test_a_port_is_free_again_while_the_bytes_still_move() -> None:
    def rank(comm: Comm) -> float:
        from_root(comm, 200)
        return comm.now()

    # 100 B/s: the first alone from 1 s to 2 s, both to 4 s, then the second alone.
    assert simulate(rank, network=uniform(3, 1.0, 100.0)).values == [5.0, 4.0, 5.0]


def test_small_messages_that_leave_eagerly_occupy_the_port_too() -> None:
    def rank(comm: Comm) -> Any:
        if comm.rank:
            comm.recv(bytes_(0), 0)
            comm.recv(bytes_(0), 0)
        else:
            comm.send(bytes_(0), 1)
            comm.send(bytes_(0), 1)
        return comm.now()

    result = simulate(rank, network=uniform(2, 1.0, 1.0), eager_bytes=10)
    assert result.values == [0.0, 2.0]
    assert [m.start_s for m in result.trace.transfers] == [0.0, 1.0]


def test_the_overhead_is_the_networks_or_what_simulate_is_given_and_never_above_the_latency(
) -> None:
    def elapsed_s(given_s: float | None, **options: Any) -> float:
        return simulate(from_root, 0, network=racks(1, 5, latency_s=5e-6, **options),
                        overhead_s=given_s).elapsed_s

    assert elapsed_s(None) == pytest.approx(10e-6 + 3e-6)
    assert elapsed_s(None, overhead_s=2e-6) == pytest.approx(10e-6 + 6e-6)
    assert elapsed_s(3e-6, overhead_s=2e-6) == pytest.approx(10e-6 + 9e-6)
    assert elapsed_s(0.0) == pytest.approx(10e-6)
    assert elapsed_s(1.0) == pytest.approx(40e-6)


@pytest.mark.parametrize("overhead_s", [-1e-6, math.inf, math.nan, "1us", True])
def test_an_overhead_that_makes_no_sense_is_quoted(overhead_s: Any) -> None:
    with pytest.raises(ConfigError, match="overhead_s must be"):
        simulate(from_root, 0, network=uniform(2, 1.0, 1.0), overhead_s=overhead_s)


def test_a_replay_agrees_also_when_a_latency_changes_while_messages_wait_for_their_port() -> None:
    network = torus(3, 3, latency_s=1.0, bandwidth_Bps=100.0, overhead_s=0.75)
    for node in (1, 2):
        network = with_link(network, 0, node, latency_s=3.0, at_s=1.0)
    result = simulate(to_all, 50, network=network)
    assert len({m.start_s for m in result.trace.transfers}) == 8
    assert replay(network, result.trace)[-1].end_s == pytest.approx(result.elapsed_s)
    firsts = [m for m in result.trace.transfers if (m.src, m.dst) in [(0, 1), (0, 2)]]
    assert [m.start_s for m in firsts] == [0.0, 0.75]
    later = simulate(to_all, 50, network=network, overhead_s=1.0).trace.transfers
    assert [m.end_s - m.start_s >= 3.5 for m in later if (m.src, m.dst) == (0, 2)] == [True]
