"""Copies that live, but hear no more of the master: who says that it is over, and to whom."""

from __future__ import annotations

from typing import Any

import networkx as nx
import pytest
import torch

from dtlab import RankFailed, Result, ps, simulate
from dtlab.topology import Topology, with_link
from dtlab.topology.graphs import ShortestPaths, from_paths, join
from tests.ps.shared import on_workers
from tests.ps.test_replication import STRONG

LEASE_S, STEPS, CUT_S = 0.01, 10, 0.02
MASTER, WORKERS = 3, (4, 5)
GIVE_UP_S = 20 * LEASE_S  # and `grace_s`


def two_switches(only_near: tuple[int, ...], healed_s: float = 1e3) -> Topology:
    """The master stands at the far switch, these copies at the near one, all others at both. The
    link between the switches fails."""
    graph = nx.DiGraph()
    for rank in range(6):
        graph.add_node(rank, kind="host", host=rank)
    for side in ("near", "far"):
        graph.add_node(side, kind="switch")
    for rank in range(6):
        for side in ("near",) * (rank != MASTER) + ("far",) * (rank not in only_near):
            join(graph, rank, side, 5e-6, 1e9)
    join(graph, "near", "far", 5e-6, 1e9)
    network = from_paths(graph, "two switches", ShortestPaths(graph).path)
    network = with_link(network, "near", "far", bandwidth_Bps=0, at_s=CUT_S)
    return with_link(network, "near", "far", bandwidth_Bps=1e9, at_s=healed_s)


def trained(network: Topology, rule: ps.Replication, *, grace_s: float,
            pauses_s: tuple[float, float], crash: dict[int, int] | None = None) -> Result:
    """The workers count to STEPS together, and pause half-way, when the link has failed."""
    @on_workers({"w": torch.zeros(1)}, servers=3, replicas=2, replication=rule,
                update=ps.SGD(lr=1.0), lease_s=LEASE_S, grace_s=grace_s)
    def body(node: ps.Node) -> Any:
        for step in range(STEPS):
            step_s = pauses_s[node.comm.rank - WORKERS[0]] if step == STEPS // 2 else CUT_S / STEPS
            with node.comm.compute("step", seconds=step_s):
                pass
            node.push({"w": -torch.ones(1)})
            node.clock()
            node.pull(["w"])
        return node.pull(["w"])["w"].item()

    return simulate(body, network=network, timeout=60, trace=False, crash=crash or {})


@pytest.mark.parametrize("pauses_s", [(0.05, 0.05), (0.05, 0.6), (0.4, 0.6), (0.6, 0.6)])
@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_a_head_that_was_replaced_and_ends_does_not_end_the_training_of_others(
    rule: ps.Replication, pauses_s: tuple[float, float]
) -> None:
    """It doesn't know that it was. Workers that pause for long read what it says before they read
    what the master has said; those that don't, after that, and perhaps while they wait."""
    values = trained(two_switches((0,)), rule, grace_s=0.0, pauses_s=pauses_s).values
    assert values[4:] == [STEPS, STEPS]
    assert list(values[MASTER].dead) == [0]
    assert values[0].cut_off


@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_copies_out_of_touch_with_the_master_wait_for_as_long_as_workers_want_to(
    rule: ps.Replication
) -> None:
    network = two_switches((0, 1, 2), healed_s=CUT_S + 1.5 * GIVE_UP_S)
    values = trained(network, rule, grace_s=2 * GIVE_UP_S, pauses_s=(0.01, 0.01)).values
    assert values[4:] == [STEPS, STEPS]
    assert not any(copy.cut_off for copy in values[:3])


@pytest.mark.parametrize("pause_s", [0.01, 3 * GIVE_UP_S])
@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_but_no_longer(rule: ps.Replication, pause_s: float) -> None:
    """They are refused; or, if they ask only later, hear that nobody is left."""
    says = r"rank [45]: (the server's leader has|the leader of server 0 has|all copies of server 0)"
    with pytest.raises(RankFailed, match=says):
        trained(two_switches((0, 1, 2)), rule, grace_s=GIVE_UP_S, pauses_s=(pause_s, pause_s))


@pytest.mark.parametrize("also", [(), (0,), (0, 1)])
@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_copies_whose_master_is_dead_say_so_when_they_end(
    rule: ps.Replication, also: tuple[int, ...]
) -> None:
    """Nobody else could; even if the head is dead, too."""
    crash = {MASTER: 40, **dict.fromkeys(also, 200)}
    says = r"(leader of server 0|the server's leader) has lost touch with the master"
    with pytest.raises(RankFailed, match=says):
        trained(two_switches(()), rule, grace_s=0.0, pauses_s=(0.6, 0.6), crash=crash)
