"""Nodes that fall asleep: a process that is slow looks dead, is given up, wakes, and writes on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dtlab import Comm, RankFailed, Result, ps, simulate
from dtlab.ps.messages import Endpoint, ReceivedMessage
from dtlab.topology import Topology, uniform
from dtlab.topology.graphs import ShortestPaths, from_paths, join
from tests.ps.shared import on_workers
from tests.ps.test_replication import STRONG, WEAK
from tests.simulator.shared import pause

GONE = "have died, or had not caught up"
LEASE_S, STEPS, KEYS = 0.01, 8, ["a", "b", "c"]
receive = Endpoint.receive


@contextmanager
def sleepy(seed: int, often: float, leases: float, ranks: range) -> Iterator[None]:
    """Inside, each of `ranks` now and then sleeps before it looks for messages: at a share `often`
    of its looks, for up to `leases` leases."""
    dice = {rank: random.Random(seed * 100 + rank) for rank in ranks}

    def later(endpoint: Endpoint, timeout_s: float | None = None) -> ReceivedMessage | None:
        rng = dice.get(endpoint.comm.rank)
        if rng is not None and rng.random() < often:
            sleep_s = LEASE_S * leases * rng.random() * rng.choice([0.04, 0.2, 0.4, 1.0])
            pause(endpoint.comm, "asleep", sleep_s)
        return receive(endpoint, timeout_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Endpoint, "receive", later)
        yield


def train(comm: Comm, servers: int, replicas: int, rule: ps.Replication,
          consistency: ps.Consistency, kind: str) -> Any:
    """Each step adds one to a key of each server: under BSP by all workers together, else by each
    of them."""
    node = ps.join(comm, servers=servers, replicas=replicas, replication=rule,
                   update=ps.SGD(lr=1.0), consistency=consistency, lease_s=LEASE_S, grace_s=10.0)
    if node.is_server:
        return node.serve()
    node.init({key: torch.zeros(3, 2) for key in KEYS}, tables=KEYS if kind == "rows" else ())
    for _ in range(STEPS):
        node.pull(KEYS)
        pause(comm, "step", 0.0007 * (comm.rank % 4))
        if kind == "rows":
            for key in KEYS:
                node.push_rows(key, [0, 2], -torch.ones(2, 2))
        else:
            handles = [node.push_async({key: -torch.ones(3, 2)}) for key in KEYS]
            for handle in handles:
                handle.wait()
        node.clock()
    last = node.pull(KEYS)
    node.finish()
    return [last[key][0, 0].item() for key in KEYS]


def check(result: Result, servers: int, wanted: float) -> None:
    """All is counted once, nobody led beside another, and copies that were never given up agree."""
    log, workers = result.values[servers], result.values[servers + 1 :]
    assert torch.tensor(workers).amax(0).tolist() == [wanted] * len(KEYS)
    assert log.overlaps() == []
    groups: dict[tuple[Any, ...], set[int]] = {}
    for copy in result.values[:servers]:
        if copy is not None and copy.server not in log.dead:
            groups.setdefault(tuple(sorted(copy.load)), set()).add(copy.checksum)
    assert all(len(checksums) == 1 for checksums in groups.values())


def wanted(consistency: ps.Consistency, workers: int) -> float:
    return STEPS if isinstance(consistency, ps.BSP) else STEPS * workers


@given(rule=st.sampled_from(STRONG), consistency=st.sampled_from([ps.BSP(), ps.ASP(), ps.SSP(2)]),
       kind=st.sampled_from(["dense", "rows"]), seed=st.integers(0, 1 << 20),
       often=st.sampled_from([0.003, 0.01, 0.03]), leases=st.sampled_from([1, 2.5, 5, 15]))
@example(rule=ps.Chain(), consistency=ps.ASP(), kind="dense", seed=249, often=0.01, leases=2.5)
@example(rule=ps.Chain(), consistency=ps.SSP(2), kind="dense", seed=224596, often=0.03, leases=15)
def test_however_long_ranks_sleep_all_is_counted_once(
    rule: ps.Replication, consistency: ps.Consistency, kind: str, seed: int, often: float,
    leases: float
) -> None:
    with sleepy(seed, often, leases, range(6)):
        result = simulate(train, 3, 2, rule, consistency, kind, timeout=60, trace=False,
                          network=uniform(6, 1e-5, 1e9))
    check(result, 3, wanted(consistency, 2))


@given(rule=st.sampled_from(STRONG), seed=st.integers(0, 1 << 20),
       often=st.sampled_from([0.003, 0.01, 0.03]), leases=st.sampled_from([1, 2.5, 5]),
       world=st.sampled_from([(3, 2, 1), (5, 4, 2), (6, 2, 1), (2, 1, 1)]),
       crashes=st.lists(st.integers(10, 500), min_size=2, max_size=2))
def test_some_sleep_some_crash_and_all_is_counted_once(
    rule: ps.Replication, seed: int, often: float, leases: float, world: tuple[int, int, int],
    crashes: list[int]
) -> None:
    servers, replicas, victims = world
    groups = servers // (replicas + 1)
    chosen = random.Random(seed).sample(range(0, servers, groups), victims)
    try:
        with sleepy(seed, often, leases, range(servers + 4)):
            result = simulate(train, servers, replicas, rule, ps.BSP(), "dense", timeout=60,
                              trace=False, network=star(seed, servers + 4),
                              crash=dict(zip(chosen, crashes, strict=False)))
    except RankFailed as failed:  # the others were given up at that time, while they slept
        told = str(failed)
    else:
        told = GONE
        check(result, servers, STEPS)
    assert GONE in told


def star(seed: int, ranks: int) -> Topology:
    """Ranks near to a switch and far from it, so that messages overtake others'."""
    rng, graph = random.Random(seed), nx.DiGraph()
    for rank in range(ranks):
        graph.add_node(rank, kind="host", host=rank)
    graph.add_node("switch", kind="switch")
    for rank in range(ranks):
        join(graph, rank, "switch", 10 ** rng.uniform(-5.5, -3.2), 1e9)
    return from_paths(graph, "star", ShortestPaths(graph).path)


@given(seed=st.integers(0, 1 << 20), leases=st.sampled_from([1, 2.5, 5]),
       event=st.integers(10, 400))
def test_with_a_leader_that_answers_first_the_training_ends_all_the_same(
    seed: int, leases: float, event: int
) -> None:
    try:
        with sleepy(seed, 0.01, leases, range(6)):
            result = simulate(train, 3, 2, WEAK, ps.ASP(), "dense", timeout=60, trace=False,
                              crash={seed % 3: event}, network=uniform(6, 1e-5, 1e9))
    except RankFailed as failed:
        told = str(failed)
    else:
        told = GONE
        assert all(count <= 2 * STEPS for worker in result.values[4:] for count in worker)
    assert GONE in told


@on_workers({"w": torch.zeros(1)}, servers=3, replicas=2, update=ps.SGD(lr=1.0), lease_s=LEASE_S)
def push_and_count(node: ps.Node) -> Any:
    for _ in range(STEPS):
        node.pull(["w"])
        node.push({"w": -torch.ones(1)})
        node.clock()
    return node.pull(["w"])["w"].item()


def test_a_head_that_sleeps_for_longer_than_its_lease_refuses_nothing_and_loses_no_clock() -> None:
    """What it was asked meanwhile is done later, or by another, in order."""
    for seed in range(40):
        with sleepy(seed, 0.1, 1.2, range(1)):
            values = simulate(push_and_count, timeout=60, network=uniform(6, 1e-5, 1e9)).values
        assert values[1].clocks == {4: STEPS, 5: STEPS}
        assert values[4:] == [STEPS, STEPS]


def test_a_worker_that_is_refused_may_ask_again_and_its_clocks_count() -> None:
    def insists(comm: Comm) -> Any:
        node = ps.join(comm, servers=3, replicas=2, update=ps.SGD(lr=1.0), lease_s=LEASE_S,
                       consistency=ps.ASP(), grace_s=0.0)
        if node.is_server:
            return node.serve()
        node.init({"w": torch.zeros(1)})
        refused = 0

        def again(call: Callable[[], Any]) -> None:
            nonlocal refused
            while True:
                try:
                    call()
                except ps.Unavailable:
                    refused += 1
                else:
                    return

        for _ in range(30):
            pause(comm, "step", 0.002)
            node.clock()
            again(lambda: node.pull(["w"]))
        again(node.finish)
        return refused

    refused = 0
    for seed in range(8):
        with sleepy(seed, 0.05, 3, range(3, 4)):  # the master
            values = simulate(insists, timeout=60, network=uniform(6, 1e-5, 1e9)).values
        assert values[1].clocks == {4: 30, 5: 30}
        refused += sum(values[4:])
    assert refused > 10


@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_an_answer_that_died_with_its_copy_is_given_by_another(rule: ps.Replication) -> None:
    """Even if a worker hears of the death sooner than the head, which sleeps, and asks it again."""
    @on_workers({"w": torch.zeros(1)}, servers=3, replicas=2, replication=rule,
                consistency=ps.ASP(), update=ps.SGD(lr=1.0), lease_s=LEASE_S)
    def ask(node: ps.Node) -> Any:
        for _ in range(STEPS):
            node.push({"w": -torch.ones(1)})
        return node.pull(["w"])["w"].item()

    for event in range(10, 30):
        for seed in range(4):
            with sleepy(seed, 0.1, 0.6, range(1)):
                values = simulate(ask, network=uniform(6, 1e-5, 1e9), crash={2: event},
                                  timeout=60).values
            assert max(values[4:]) == 2 * STEPS
