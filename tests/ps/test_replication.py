"""Copies of servers: crashes at every event, links that are cut, copies that come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtlab import Comm, ConfigError, Result, ps, recording, simulate
from dtlab.topology import Topology, uniform
from tests.ps.shared import on_workers
from tests.simulator.shared import pause

STRONG = [ps.Chain(), ps.Leader(sync=True)]
WEAK = ps.Leader(sync=False)
COPIES, STEPS, WORKERS = 3, 3, 2
MASTER = COPIES
COUNTING, FREE = ps.SGD(lr=1.0), ps.ASP()


def body(comm: Comm, rule: ps.Replication, update: ps.Update, consistency: ps.Consistency) -> Any:
    """Each push adds one: the weight counts the pushes."""
    node = ps.join(comm, servers=COPIES, replicas=COPIES - 1, replication=rule, update=update,
                   consistency=consistency, lease_s=0.01)
    if node.is_server:
        return node.serve()
    node.init({"w": torch.zeros(2)})
    for _ in range(STEPS):
        node.pull(["w"])
        pause(comm, "step", 0.001 * comm.rank)
        node.push({"w": -torch.ones(2)})  # returns: it is acknowledged
        node.clock()
    last = node.pull(["w"])["w"][0].item()
    node.finish()
    return last


def ran(rule: ps.Replication, crash: dict[int, int], update: ps.Update = COUNTING,
        consistency: ps.Consistency = FREE) -> Result:
    return simulate(lambda comm: body(comm, rule, update, consistency), crash=crash, timeout=60,
                    network=uniform(COPIES + 1 + WORKERS, 1e-5, 1e9), trace=False)


def at_every_event(rule: ps.Replication, victim: int, step: int = 1, **how: Any) -> list[Result]:
    """The runs in which `victim` crashes before its first event, the one `step` later, … the last.
    """
    results = []
    while not results or results[-1].values[victim] is None:
        results.append(ran(rule, {victim: step * len(results)}, **how))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(COPIES))
@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_no_acknowledged_push_is_lost_and_none_counts_twice(
    rule: ps.Replication, victim: int
) -> None:
    results = at_every_event(rule, victim)
    assert len(results) > 40
    for result in results:
        assert max(result.values[MASTER + 1 :]) == STEPS * WORKERS
        assert result.values[MASTER].overlaps() == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_bsp_with_momentum_goes_on_bit_for_bit(rule: ps.Replication) -> None:
    """What a copy takes over is not the weights alone: the rule's state, the clocks, who waits.
    At every seventh event; that no push is lost, or counts twice, is shown at each."""
    how = {"update": ps.SGD(0.1, momentum=0.9), "consistency": ps.BSP()}
    wanted = ran(rule, {}, **how).values[MASTER + 1 :]
    for victim in range(COPIES):
        for result in at_every_event(rule, victim, 7, **how):
            assert result.values[MASTER + 1 :] == wanted


@given(rule=st.sampled_from(STRONG), victims=st.permutations(range(COPIES)),
       first=st.integers(0, 60), later=st.integers(-10, 10))
def test_of_three_copies_any_two_may_crash(
    rule: ps.Replication, victims: list[int], first: int, later: int
) -> None:
    result = ran(rule, {victims[0]: first, victims[1]: max(first + later, 0)})
    assert max(result.values[MASTER + 1 :]) == STEPS * WORKERS
    assert result.values[MASTER].overlaps() == []


def test_a_leader_that_answers_first_may_lose_what_it_has_answered() -> None:
    lost = [STEPS * WORKERS - max(result.values[MASTER + 1 :])
            for result in at_every_event(WEAK, 0, 3)]
    assert max(lost) == 1  # the one push that nobody else had yet
    assert 0 < sum(lost) < len(lost) / 2
    assert min(lost) == 0  # none counts twice


def test_once_all_is_over_copies_are_equal_bit_for_bit() -> None:
    for rule in (*STRONG, WEAK):
        copies = ran(rule, {}, update=ps.Adam(0.1)).values[:COPIES]
        assert len({copy.checksum for copy in copies}) == 1
        assert all(copy.pushes == STEPS * WORKERS for copy in copies)


def test_when_all_copies_are_gone_workers_are_told() -> None:
    with pytest.raises(ps.Unavailable, match="all copies of server 0 have died"):
        ran(ps.Chain(), {0: 20, 1: 20, 2: 20})


def test_keys_are_spread_over_servers_that_each_have_copies() -> None:
    @on_workers(servers=4, replicas=1, update=ps.SGD(lr=1.0), lease_s=0.01)
    def many(node: ps.Node) -> Any:
        keys = [f"k{i}" for i in range(10)]
        node.init({key: torch.zeros(3) for key in keys})
        for _ in range(3):
            node.pull(keys)
            pause(node.comm, "step", 0.01)
            node.push({key: -torch.ones(3) for key in keys})
            node.clock()
        return [w.tolist() for w in node.pull(keys).values()]

    values = simulate(many, network=uniform(7, 1e-5, 1e9), crash={0: 60, 3: 70}).values
    assert values[5] == values[6] == [[3.0] * 3] * 10
    assert values[1].checksum != values[2].checksum  # of different servers
    assert set(values[4].dead) == {0, 3}


# ---- a link is cut ------------------------------------------------------------------------------

CUT_S, HEALED_S, NEAR = 0.02, 0.12, 5


def islands(near: tuple[int, ...] = (0, NEAR), ranks: int = 6) -> Topology:
    """Some ranks on one side, the others on the other: copies 1 and 2, the master, worker 4."""
    return recording.islands(CUT_S, HEALED_S, near, ranks, link_s=5e-6)


def cut_off(comm: Comm, rule: ps.Replication) -> Any:
    """A push every 5 ms, for 40 steps; how many were acknowledged, when each was refused."""
    node = ps.join(comm, servers=3, replicas=2, replication=rule, update=ps.SGD(lr=1.0),
                   consistency=ps.ASP(), lease_s=0.01, grace_s=0.03)
    if node.is_server:
        return node.serve()
    node.init({"w": torch.zeros(1)})
    acknowledged, refused = [], []
    for _ in range(40):
        pause(comm, "step", 0.005)
        try:
            node.push({"w": -torch.ones(1)})
            acknowledged.append(comm.now())
        except ps.Unavailable:
            refused.append(comm.now())
    last = node.pull(["w"])["w"].item()
    node.finish()
    return acknowledged, refused, last


@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_a_strong_leader_that_is_cut_off_refuses_and_the_others_go_on(
    rule: ps.Replication
) -> None:
    values = simulate(lambda comm: cut_off(comm, rule), network=islands(), timeout=60).values
    (far, _, far_last), (near, refused, near_last) = values[4:]
    assert refused
    assert all(CUT_S + 0.03 < at < HEALED_S + 0.02 for at in refused)  # not at once
    assert not any(CUT_S + 0.011 < at < HEALED_S for at in near)  # beyond the lease: not one
    assert any(CUT_S + 0.04 < at < HEALED_S for at in far)  # its side has a new leader
    counted = max(far_last, near_last)
    assert len(far) + len(near) <= counted <= len(far) + len(near) + len(refused)
    assert values[MASTER].overlaps() == []


def test_a_weak_leader_that_is_cut_off_goes_on_and_its_pushes_are_lost() -> None:
    values = simulate(lambda comm: cut_off(comm, WEAK), network=islands(), timeout=60).values
    (far, _, far_last), (near, refused, near_last) = values[4:]
    assert refused == []
    gone = len(far) + len(near) - max(far_last, near_last)
    during = sum(CUT_S < at < HEALED_S for at in near)
    assert during > 10  # it went on answering
    assert during - 2 <= gone <= during + 2
    assert gone <= values[0].lost <= gone + 2  # it can't know what arrived just before


@pytest.mark.parametrize("rule", [*STRONG, WEAK], ids=repr)
def test_a_copy_that_comes_back_is_brought_up_to_date_while_training_goes_on(
    rule: ps.Replication
) -> None:
    values = simulate(lambda comm: cut_off(comm, rule), network=islands(), timeout=60).values
    assert values[0].rejoined == 1
    assert 0 in values[MASTER].back
    assert len({copy.checksum for copy in values[:3]}) == 1


@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_pushes_that_come_while_a_copy_is_brought_up_to_date_reach_it(
    rule: ps.Replication
) -> None:
    @on_workers({"w": torch.zeros(1)}, servers=3, replicas=2, replication=rule,
                update=ps.SGD(lr=1.0), consistency=ps.ASP(), lease_s=0.01)
    def hasty(node: ps.Node) -> None:
        wait_s = HEALED_S - 1e-3 if node.comm.rank == 4 else HEALED_S + 0.03
        pause(node.comm, "until the link is back", wait_s)
        while node.comm.rank == 4 and node.comm.now() < HEALED_S + 2e-3:
            node.push({"w": -torch.ones(1)})

    copies = simulate(hasty, network=islands(), timeout=60).values[:3]
    assert copies[0].rejoined == 1
    assert copies[1].pushes > 20
    assert len({copy.checksum for copy in copies}) == 1


def test_a_copy_that_has_come_back_can_lead() -> None:
    """Both others crash after that: it must have all there is."""
    for events in (410, 420, 430):
        values = simulate(lambda comm: cut_off(comm, ps.Chain()), network=islands(), timeout=60,
                          crash={1: events, 2: events}).values
        (far, _, far_last), (near, refused, near_last) = values[4:]
        assert min(values[MASTER].dead[1], values[MASTER].dead[2]) > values[MASTER].back[0]
        counted = max(far_last, near_last)
        assert len(far) + len(near) <= counted <= len(far) + len(near) + len(refused)


def test_reading_from_any_copy_shares_the_load() -> None:
    @on_workers({"hot": torch.ones(4)}, servers=3, replicas=2, consistency=ps.ASP())
    def reader(node: ps.Node, peek: bool) -> None:
        for _ in range(30):
            found = node.peek(["hot"]) if peek else node.pull(["hot"])
            assert found["hot"].tolist() == [1.0] * 4

    sent = [[copy.sent_bytes for copy in simulate(
        lambda comm, peek=peek: reader(comm, peek), network=uniform(8, 1e-5, 1e9)).values[:3]]
        for peek in (False, True)]
    assert max(sent[0]) >= 4 * 30 * 16  # all from one
    assert max(sent[1]) < 0.5 * max(sent[0])


@pytest.mark.parametrize(("how", "says"), [
    ({"servers": 3, "replicas": 1}, "multiple of 2"),
    ({"servers": 4, "replicas": 1}, "need 6 ranks"),
    ({"servers": 2, "replicas": -1}, "0 or more"),
    ({"servers": 2, "replicas": 1, "lease_s": 0}, "lease_s"),
    ({"servers": 2, "replicas": 1, "replication": "chain"}, "ps.Replication"),
    ({"servers": 5, "replicas": 4, "colocated": True}, "no replicas"),
])
def test_copies_that_make_no_sense_are_refused(how: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        simulate(lambda comm: ps.join(comm, **how), network=uniform(5, 1e-5, 1e9))
