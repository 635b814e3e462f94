"""A copy that comes back while pushes come fast: crashes meanwhile, what readers see, retries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtlab.ps.replica_loop
from dtlab import Comm, RankFailed, Result, ps, simulate
from dtlab.ps.replica import Replica
from dtlab.topology import uniform
from tests.ps.shared import on_workers
from tests.ps.test_replication import HEALED_S, MASTER, STRONG, islands

HASTY, LATE = 4, 5  # workers
DURING = (220, 390)  # a copy's events between the first push and the last, about


def copied(rule: ps.Replication, copies: int = 3) -> dict[str, Any]:
    """How to join."""
    return {"servers": copies, "replicas": copies - 1, "replication": rule,
            "update": ps.SGD(lr=1.0), "consistency": ps.ASP(), "lease_s": 0.01}


def wait(comm: Comm, until_s: float) -> None:
    with comm.compute("wait", seconds=max(until_s - comm.now(), 0.0)):
        pass


def hasty(comm: Comm, rule: ps.Replication, copies: int = 3) -> Any:
    """One worker pushes as fast as it can from just before the link heals until after copy 0 is
    back. How many pushes were acknowledged, and how many the weight counts."""
    node = ps.join(comm, **copied(rule, copies))
    if node.is_server:
        return node.serve()
    node.init({"w": torch.zeros(1)})
    acknowledged, hurries = 0, comm.rank == copies + 1
    wait(comm, HEALED_S - 3e-4 if hurries else HEALED_S + 0.05)
    while hurries and comm.now() < HEALED_S + 1e-3:
        node.push({"w": -torch.ones(1)})
        acknowledged += 1
    last = node.pull(["w"])["w"].item()
    node.finish()
    return acknowledged, last


def crashed(rule: ps.Replication, crash: dict[int, int]) -> Result:
    return simulate(lambda comm: hasty(comm, rule), network=islands(), crash=crash, timeout=60,
                    trace=False)


@pytest.mark.parametrize("victim", [1, 2])
@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_a_crash_while_a_copy_comes_back_neither_stalls_nor_loses_nor_doubles(
    rule: ps.Replication, victim: int
) -> None:
    for event in range(*DURING, 10):
        values = crashed(rule, {victim: event}).values
        acknowledged, counted = values[HASTY]
        assert counted == values[LATE][1] == acknowledged
        assert {0, victim} == set(values[MASTER].dead)
        assert values[MASTER].overlaps() == []


@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_a_copy_that_has_not_caught_up_never_speaks_for_what_was_answered(
    rule: ps.Replication
) -> None:
    """Those that have everything crash. Either the one that came back has it too, or it says no."""
    together = [{1: event, 2: event} for event in range(*DURING, 10)]
    alone = [{1: 30, 2: event} for event in range(360, 384, 2)]  # 2 is left to bring 0 up to date
    outcomes = set()
    for crash in together + alone:
        try:
            acknowledged, counted = crashed(rule, crash).values[HASTY]
        except RankFailed as failed:
            outcomes.add("had not caught up; its keys are gone" in str(failed))
        else:
            assert counted == acknowledged
            outcomes.add("had all")
    assert outcomes == {True, "had all"}


@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_two_copies_come_back_one_after_the_other(rule: ps.Replication) -> None:
    """What is kept for the one is not forgotten for the other."""
    values = simulate(lambda comm: hasty(comm, rule, copies=3), timeout=60,
                      network=islands(near=(0, 1, LATE))).values
    assert [copy.rejoined for copy in values[:3]] == [1, 1, 0]
    assert set(values[MASTER].back) == {0, 1}
    assert values[HASTY][0] == values[HASTY][1] == values[LATE][1] > 20
    assert len({copy.checksum for copy in values[:3]}) == 1


def test_the_log_is_not_kept_for_a_copy_that_has_fallen_silent_again(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies just before the link heals; its last signs of life arrive, and it is called back."""
    replicas: list[Replica] = []

    def noted(*args: Any) -> Replica:
        replicas.append(Replica(*args))
        return replicas[-1]

    @on_workers({"w": torch.zeros(1)}, **copied(ps.Chain()))
    def steady(node: ps.Node) -> None:
        wait(node.comm, HEALED_S + (0.1 if node.comm.rank == LATE else -0.01))
        for _ in range(30 if node.comm.rank == HASTY else 0):
            wait(node.comm, node.comm.now() + 0.002)
            node.push({"w": -torch.ones(1)})

    monkeypatch.setattr(dtlab.ps.replica_loop, "Replica", noted)
    values = simulate(steady, network=islands(), crash={0: 98}, timeout=60).values
    assert 0 not in values[MASTER].back
    assert values[0] is None
    assert [len(replica.log) for replica in replicas if replica.me > 0] == [0, 0]


def test_a_request_that_is_sent_again_counts_once() -> None:
    """The tail dies with pushes on their way; the worker sends them again to a head that has
    them in its log."""
    @on_workers({"w": torch.zeros(1)}, **copied(ps.Chain()))
    def pushes(node: ps.Node) -> Any:
        for _ in range(3):
            for handle in [node.push_async({"w": -torch.ones(1)}) for _ in range(4)]:
                handle.wait()
        return node.pull(["w"])["w"].item(), node._requests.retries if node._requests else 0

    retries = 0
    for event in range(10, 40):
        last, again = simulate(pushes, network=uniform(5, 1e-5, 1e9), crash={2: event},
                               timeout=60, trace=False).values[HASTY]
        assert last == 12
        retries += again
    assert retries >= 10


@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_a_pull_never_shows_a_push_that_not_all_copies_have(rule: ps.Replication) -> None:
    """The head is cut off with two workers while its lease still runs: one pushes, one pulls. What
    has been seen once is never unseen, wherever one looks."""
    reader = 6

    @on_workers({"w": torch.zeros(1)}, **copied(rule))
    def looks(node: ps.Node) -> Any:
        wait(node.comm, 0.0201)  # the link is cut
        seen = []
        for _ in range(100):
            try:
                if node.comm.rank == LATE and node.comm.now() < HEALED_S - 0.02:
                    node.push({"w": -torch.ones(1)})
                begin_s = node.comm.now()
                seen.append((begin_s, node.pull(["w"])["w"].item(), node.comm.now()))
            except ps.Unavailable:
                pass
            wait(node.comm, node.comm.now() + 0.002)
        return seen

    values = simulate(looks, network=islands(near=(0, LATE, reader), ranks=7), timeout=60).values
    pulls = sorted((pull for seen in values[HASTY:] for pull in seen), key=lambda pull: pull[0])
    assert len(pulls) > 100
    for begin_s, counted, _ in pulls:
        assert counted >= max((c for _, c, end_s in pulls if end_s < begin_s), default=0.0)


def test_who_has_most_of_the_log_leads_after_a_leader_and_a_chain_keeps_its_order() -> None:
    """What a follower has beyond its new leader's log would stand in another request's place."""
    had = {1: 3, 2: 5, 0: 3}
    assert ps.Leader().order((1, 2, 0), had) == (2, 1, 0)
    assert ps.Chain().order((2, 1, 0), {2: 5, 1: 4, 0: 3}) == (2, 1, 0)
