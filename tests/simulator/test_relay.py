"""A relay without data needs no strand for its steps; nobody may notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtlab import Comm, Deadlock, RankFailed, simulate
from dtlab.collectives import all_reduce
from dtlab.relay import one_by_one, relay
from dtlab.topology import fat_tree, uniform

NETWORKS = [uniform(3, 1e-5, 1e9), uniform(7, 1e-5, 1e9), fat_tree(4, oversubscription=2)]


def walk(comm: Comm, how: Any, sizes: list[int], device: str) -> float:
    """Two relays with something else between them; returns when this rank had ended."""
    p = comm.size
    chunks = [torch.zeros(n, device=device) for n in (sizes * p)[:p]]
    tour = [chunks[(comm.rank - step) % p] for step in range(2 * p - 1)]
    with comm.labelled("first"):
        how(comm, tour, (comm.rank + 1) % p, (comm.rank - 1) % p, "sum", p - 1)
    with comm.compute("thinking", 1e-4 * comm.rank):
        pass
    how(comm, tour[:p], (comm.rank + 1) % p, (comm.rank - 1) % p, "sum", 0)
    return comm.now()


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
@pytest.mark.parametrize("sizes", [[1000], [1, 0, 5000, 77]])
@pytest.mark.parametrize("gamma", [0.0, 1e-9])
@pytest.mark.parametrize("strands", ["greenlet", "thread"])
@pytest.mark.parametrize("eager_bytes", [0, 4096])
def test_traces_are_those_of_single_messages(
    network: Any, sizes: list[int], gamma: float, strands: str, eager_bytes: int
) -> None:
    given: dict[str, Any] = {"network": network, "gamma": gamma, "strands": strands,
                             "eager_bytes": eager_bytes}
    ways = [simulate(walk, how, sizes, device, **given)
            for how in (relay, one_by_one) for device in ("meta", "cpu")]
    for way in ways[1:]:
        assert way.values == ways[0].values
        assert list(way.trace.events) == list(ways[0].trace.events)


def test_what_does_not_fit_is_raised_where_the_relay_was_called() -> None:
    def rank(comm: Comm) -> str:
        chunks = [torch.empty(4, device="meta")] * 4
        if comm.rank == 1:
            chunks[2] = torch.empty(5, device="meta")
        try:
            relay(comm, chunks, 1 - comm.rank, 1 - comm.rank)
        finally:
            ended.append(comm.rank)
        return "unreached"

    ended: list[int] = []
    with pytest.raises(RankFailed, match="ShapeMismatch") as caught:
        simulate(rank, network=uniform(2, 1e-5, 1e9))
    assert "relay(comm, chunks" in str(caught.value)
    assert sorted(ended) == [0, 1]


def test_who_waits_in_a_relay_stands_in_the_table() -> None:
    def rank(comm: Comm, device: str) -> None:
        if comm.rank != 2:
            chunks = [torch.empty(4, device=device)] * 4
            relay(comm, chunks, (comm.rank + 1) % 4, (comm.rank - 1) % 4)

    tables = []
    for device in ("meta", "cpu"):
        with pytest.raises(Deadlock) as caught:
            simulate(rank, device, network=uniform(4, 1e-5, 1e9))
        tables.append([row[:4] for row in caught.value.waiting])
        assert all("in rank" in row.line for row in caught.value.waiting if row.rank != 2)
    assert tables[0] == tables[1]
    assert tables[0][1][1:3] == ("send", "2")


def test_a_relay_is_over_before_the_next_line_runs() -> None:
    def rank(comm: Comm) -> list[float]:
        x = torch.empty(1 << 20, device="meta")
        times = []
        for _ in range(3):
            all_reduce(comm, x, algorithm="ring")
            times.append(comm.now())
        return times

    for times in simulate(rank, network=uniform(5, 1e-5, 1e9)).values:
        one = 8 * (1e-5 + (1 << 22) / 5 / 1e9)
        assert times == pytest.approx([one, 2 * one, 3 * one], rel=1e-4)
