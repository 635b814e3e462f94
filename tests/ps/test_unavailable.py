"""Workers that leave through `Unavailable`, and links that fail for ever: each run ends."""

from __future__ import annotations

import os
import signal
from typing import Any

import networkx as nx
import pytest
import torch

from dtlab import Comm, RankFailed, Result, ps, run, simulate
from dtlab.topology import Topology, uniform, with_link
from dtlab.topology.graphs import ShortestPaths, from_paths, join
from tests.ps.shared import on_workers
from tests.ps.test_replication import STRONG, WEAK, islands
from tests.simulator.shared import pause

RANKS, MASTER, WORKERS = 6, 3, (4, 5)
LEASE_S = 0.01


def train(comm: Comm, rule: ps.Replication, consistency: ps.Consistency,
          grace_s: float | None = None) -> Any:
    """A worker that meets `Unavailable` returns what it says, and calls nothing more."""
    node = ps.join(comm, servers=3, replicas=2, replication=rule, consistency=consistency,
                   lease_s=LEASE_S, grace_s=grace_s)
    if node.is_server:
        return node.serve()
    try:
        node.init({"w": torch.zeros(1)})
        for _ in range(8):
            pause(comm, "step", 0.005)
            node.pull(["w"])
            node.push({"w": torch.ones(1)})
            node.clock()
        node.finish()
    except ps.Unavailable as unavailable:
        return str(unavailable)
    return "finished"


def trained(rule: ps.Replication, network: Topology, crash: dict[int, int] | None = None,
            consistency: ps.Consistency | None = None) -> Result:
    return simulate(train, rule, consistency or ps.BSP(), network=network, crash=crash or {},
                    timeout=30, trace=False)


@pytest.mark.parametrize("rule", [*STRONG, WEAK], ids=repr)
def test_once_all_copies_are_dead_the_master_ends_although_no_worker_finishes(
    rule: ps.Replication
) -> None:
    values = trained(rule, uniform(RANKS, 1e-5, 1e9), {0: 30, 1: 30, 2: 30}).values
    assert set(values[MASTER].dead) == {0, 1, 2}
    for worker in WORKERS:
        assert "all copies of server 0 have died" in values[worker]


def mesh(*failed: tuple[int, int]) -> Topology:
    """A link between any two ranks; these fail for ever."""
    graph = nx.DiGraph()
    for rank in range(RANKS):
        graph.add_node(rank, kind="host", host=rank)
    for rank in range(RANKS):
        for other in range(rank):
            join(graph, rank, other, 1e-5, 1e9)
    network = from_paths(graph, "mesh", ShortestPaths(graph).path)
    for a, b in failed:
        network = with_link(network, a, b, bandwidth_Bps=0, at_s=0.02)
    return network


@pytest.mark.parametrize("rule", [*STRONG, WEAK], ids=repr)
def test_workers_whose_master_is_cut_off_for_ever_may_leave(rule: ps.Replication) -> None:
    cut = [(MASTER, rank) for rank in range(RANKS) if rank != MASTER]
    values = trained(rule, mesh(*cut)).values
    assert set(values[MASTER].dead) == {0, 1, 2}
    assert all(copy.cut_off for copy in values[:3])


def test_a_worker_that_is_refused_and_leaves_is_named() -> None:
    """Its head had no lease for a while; nobody else would go on without this worker's clock."""
    with pytest.raises(RankFailed, match=r"rank 3 raised Unavailable: worker 5 has neither asked "
                                         r"again nor finished since its last call was refused"):
        simulate(train, ps.Chain(), ps.BSP(), 0.03, network=islands(), timeout=30, trace=False)


@pytest.mark.parametrize("consistency", [ps.BSP(), ps.ASP()], ids=repr)
@pytest.mark.parametrize("rule", [*STRONG, WEAK], ids=repr)
def test_a_link_that_fails_for_ever_is_named_or_does_not_matter(
    rule: ps.Replication, consistency: ps.Consistency
) -> None:
    copies = {(1, 0), (2, 1)} if rule == ps.Chain() else {(1, 0), (2, 0)} if rule.strong else set()
    ends = (0, 2) if rule == ps.Chain() else (0,)  # take requests, and answer them
    needed = copies | {(worker, rank) for worker in WORKERS for rank in ends}
    for a in range(RANKS):
        for b in range(a):
            if (a, b) not in needed:
                result = trained(rule, mesh((a, b)), consistency=consistency)
                assert result.values[MASTER + 1 :] == ["finished"] * 2
                continue
            says = (f"rank 3 raised Unavailable: the link between rank ({a} and rank {b}|{b} and "
                    f"rank {a}) carries nothing any more: ")
            with pytest.raises(RankFailed, match=says):
                trained(rule, mesh((a, b)), consistency=consistency)


def test_keys_that_move_over_a_link_that_has_failed_name_it() -> None:
    """Server 1's head is given keys by the tail of server 0, rank 2."""
    @on_workers({f"k{i}": torch.zeros(1) for i in range(8)}, servers=4, replicas=1, active=1,
                lease_s=LEASE_S)
    def moves(node: ps.Node) -> None:
        pause(node.comm, "until the link has failed", 0.05)
        node.use_servers(2)

    with pytest.raises(RankFailed, match="the link between rank 2 and rank 1 carries nothing"):
        simulate(moves, network=mesh((1, 2)), timeout=30, trace=False)


def test_a_worker_that_reaches_neither_the_copies_nor_the_master_says_so() -> None:
    def alone(comm: Comm) -> Any:
        node = ps.join(comm, servers=3, replicas=2, lease_s=LEASE_S)
        if node.is_server:
            return node.serve()
        node.init({"w": torch.zeros(1)})
        pause(comm, "until the links have failed", 0.05)
        node.pull(["w"])
        return None

    says = "rank 5: neither rank 0, for whose answer it waits, nor rank 3, the master, has said"
    with pytest.raises(RankFailed, match=says):
        simulate(alone, network=mesh(*[(5, rank) for rank in range(5)]), timeout=30, trace=False)


def test_on_processes_a_worker_whose_servers_were_killed_may_leave() -> None:
    def killed(comm: Comm) -> Any:
        pids = comm._all_gather_objects(os.getpid())
        node = ps.join(comm, servers=2, replicas=1, lease_s=0.1, grace_s=0.1)
        if node.is_server:
            return node.serve()
        node.init({"w": torch.zeros(1)})
        for rank in (0, 1):
            os.kill(pids[rank], signal.SIGKILL)
        try:
            while True:
                node.pull(["w"])
        except ps.Unavailable as unavailable:
            return str(unavailable)

    values = run(killed, ranks=4, may_die=[0, 1], timeout=40).values
    assert "all copies of server 0 have died" in values[3]
    assert set(values[2].dead) == {0, 1}
