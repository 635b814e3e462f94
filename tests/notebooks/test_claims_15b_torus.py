"""What chapter 15b says of a torus with a dead node: who waits, and what each remedy costs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import networkx as nx
import pytest
import torch

from dtlab import Comm, Deadlock, cost, simulate
from dtlab.collectives import all_reduce
from dtlab.topology import Topology, from_graph, torus, with_link

ALPHA, BANDWIDTH, ELEMENTS = 5e-6, 25e9, 25_600_000  # 102.4 MB
LINK = {"latency_s": ALPHA, "bandwidth_Bps": BANDWIDTH}


def ms(network: Topology, members: list[int], algorithm: str, **options: Any) -> float:
    """Milliseconds of an all-reduce among `members`, in that order; the others do nothing."""
    def step(comm: Comm) -> None:
        if comm.rank in members:
            x = torch.empty(ELEMENTS, device="meta")
            all_reduce(comm.subgroup(members), x, algorithm=algorithm, **options)

    return 1e3 * simulate(step, network=network, trace=False).elapsed_s


def form_ms(algorithm: str, ranks: int, alpha: float = ALPHA) -> float:
    return 1e3 * cost.time_s("all_reduce", algorithm, ranks, 4 * ELEMENTS, alpha, 1 / BANDWIDTH)


def ring_without_0(x: int, y: int) -> list[int]:
    """All ranks of an x × y torus but 0, each a neighbour of the next; y is even."""
    snake = [i * y + j for j in range(1, y)
             for i in (range(x - 1, 0, -1) if j % 2 else range(1, x))]
    return [i * y for i in range(1, x)] + snake + list(range(y - 1, 0, -1))


@pytest.mark.parametrize("events", range(8))
@pytest.mark.parametrize("algorithm", ["torus", "ring", "two_ring"])
def test_one_dead_rank_stalls_all_others(algorithm: str, events: int) -> None:
    def step(comm: Comm) -> None:
        all_reduce(comm, torch.ones(64), algorithm=algorithm)

    with pytest.raises(Deadlock) as stuck:
        simulate(step, network=torus(4, 4), crash={5: events})
    waiting = {row.rank for row in stuck.value.waiting if row.doing not in ("crashed", "returned")}
    assert waiting == set(range(16)) - {5}


def test_an_even_torus_without_a_node_has_no_ring_on_its_wires() -> None:
    """Its nodes have two colours, neighbours differ, and a ring takes as many of each."""
    for x, y in ((4, 4), (34, 32)):
        black, white = nx.bipartite.sets(torus(x, y).graph().to_undirected())
        assert len(black) == len(white)
    assert [d for d in range(2, 1087) if 1087 % d == 0] == []  # and 1,087 ranks have no grid


@pytest.mark.parametrize(("x", "y"), [(4, 4), (5, 4), (6, 4), (8, 8)])
def test_one_step_over_two_wires_slows_every_round_of_a_ring(x: int, y: int) -> None:
    network, ring = torus(x, y, **LINK), ring_without_0(x, y)
    hops = [len(network.path(a, b)) - 1 for a, b in pairwise([*ring, ring[0]])]
    assert sorted(ring) == list(range(1, x * y))
    assert sorted(hops) == [1] * (len(ring) - 1) + [2]
    assert 0 not in network.path(ring[-1], ring[0])
    assert ms(network, ring, "ring") == pytest.approx(form_ms("ring", x * y - 1, 2 * ALPHA),
                                                      rel=1e-5)


def test_the_figures_of_34_by_32() -> None:
    assert form_ms("ring", 1087) == pytest.approx(19.04, abs=0.01)  # were there such a ring
    assert form_ms("ring", 1087, 2 * ALPHA) == pytest.approx(29.90, abs=0.01)
    network, all_of = torus(34, 32, **LINK), list(range(1088))
    assert ms(network, all_of, "torus", shape=(32, 34)) == pytest.approx(8.82, abs=0.01)
    assert form_ms("torus", 33 * 32) == pytest.approx(8.81, abs=0.01)  # built so, with short wires
    assert cost.rounds("all_reduce", "torus", 33 * 32, 4 * ELEMENTS) == 126


def test_a_row_left_out_makes_its_columns_longer_by_a_wire() -> None:
    """The columns' rounds, 2(Y−1) of 33 rows, cross two wires where the row was."""
    network, rows = torus(34, 32, **LINK), list(range(32, 1088))
    left_out = ms(network, rows, "torus", shape=(32, 33))
    assert left_out == pytest.approx(form_ms("torus", 1056) + 1e3 * 2 * 32 * ALPHA, rel=1e-5)
    assert left_out == pytest.approx(9.13, abs=0.01)


def test_a_failed_wire_of_a_row_nearly_doubles_the_time_of_a_large_torus() -> None:
    """Messages of the failed wire go round, and share wires with the next row's."""
    network = torus(34, 32, **LINK)
    failed = with_link(network, 0, 1, bandwidth_Bps=0)
    assert len(failed.path(0, 1)) - 1 == 3
    assert ms(failed, list(range(1088)), "torus", shape=(32, 34)) == pytest.approx(16.55, abs=0.01)


def test_the_remedies_of_4_by_4() -> None:
    network, ranks = torus(4, 4, **LINK), list(range(16))
    dead_router = network
    for neighbour in (1, 3, 4):
        dead_router = with_link(dead_router, 0, neighbour, bandwidth_Bps=0)
    graph = network.graph()
    for rank in range(17):
        graph.add_edge(rank, "switch", **LINK)
        graph.add_edge("switch", rank, **LINK)
    spare = from_graph(graph, "torus and a spare")
    took = {
        "whole": ms(network, ranks, "torus", shape=(4, 4)),
        "row out": ms(network, ranks[4:], "torus", shape=(4, 3)),
        "row out, router too": ms(dead_router, ranks[4:], "torus", shape=(4, 3)),
        "spare in the torus": ms(network, [12, *ranks[1:12]], "torus", shape=(4, 3)),
        "spare behind a switch": ms(spare, [16, *ranks[1:]], "torus", shape=(4, 4)),
        "ring": ms(network, ring_without_0(4, 4), "ring"),
        "5 × 3": ms(network, ranks[1:], "torus", shape=(5, 3)),
    }
    assert {name: round(value, 2) for name, value in took.items()} == {
        "whole": 7.74, "row out": 7.58, "row out, router too": 7.58, "spare in the torus": 7.61,
        "spare behind a switch": 7.80, "ring": 7.93, "5 × 3": 8.88}
