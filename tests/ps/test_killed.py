"""On processes: SIGKILL of a server; training ends, and nothing acknowledged is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Timer
from typing import Any

import pytest
import torch

from dtlab import Comm, ConfigError, RankDied, RankFailed, ps, run

SERVERS, STEPS = 3, 40


def train(comm: Comm, victim: int, rule: ps.Replication) -> Any:
    pids = comm._agree(os.getpid())
    node = ps.join(comm, servers=SERVERS, replicas=SERVERS - 1, replication=rule,
                   consistency=ps.ASP(), update=ps.SGD(lr=1.0), lease_s=1.0)
    if node.is_server:
        return node.serve()
    node.init({"w": torch.zeros(20_000)})
    longest_s = 0.0
    for step in range(STEPS):
        if comm.rank == SERVERS + 1 and step == STEPS // 2:
            os.kill(pids[victim], signal.SIGKILL)
        begin_s = time.monotonic()
        node.pull(["w"])
        longest_s = max(longest_s, time.monotonic() - begin_s)
        node.push({"w": -torch.ones(20_000)})
        node.clock()
    last = node.pull(["w"])["w"]
    node.finish()
    return last.min().item(), last.max().item(), longest_s


@pytest.mark.parametrize(("victim", "rule"), [
    (0, ps.Chain()), (1, ps.Chain()), (2, ps.Chain()), (0, ps.Leader()), (2, ps.Leader()),
], ids=repr)
def test_a_server_is_killed_and_training_ends_without_loss(
    victim: int, rule: ps.Replication
) -> None:
    result = run(train, victim, rule, ranks=6, may_die=range(SERVERS))
    assert result.values[victim] is None
    lowest, highest = zip(*[value[:2] for value in result.values[SERVERS + 1 :]], strict=True)
    assert max(highest) == 2 * STEPS  # each acknowledged push, once
    assert lowest == highest
    assert max(value[2] for value in result.values[SERVERS + 1 :]) < 3
    log = result.values[SERVERS]
    assert victim in log.dead
    assert log.overlaps() == []


def killed_at(comm: Comm, victim: int, after_s: float, rule: ps.Replication,
              consistency: ps.Consistency) -> Any:
    """A short training; `victim` is killed so long after all have begun."""
    pids = comm._agree(os.getpid())
    if comm.rank != SERVERS:
        comm.send("I have begun", SERVERS)  # and wait for nobody who may die
    else:  # the master
        for other in set(range(comm.size)) - {SERVERS}:
            comm.recv_object(other)
        Timer(after_s, lambda: os.kill(pids[victim], signal.SIGKILL)).start()
    node = ps.join(comm, servers=SERVERS, replicas=SERVERS - 1, replication=rule,
                   consistency=consistency, update=ps.SGD(lr=1.0), lease_s=0.3)
    if node.is_server:
        return node.serve()
    node.init({"w": torch.zeros(2000)})
    steps, longest_s, begin_s = 0, 0.0, time.monotonic()
    while steps < 20 or time.monotonic() < begin_s + after_s + 0.05:
        asked_s = time.monotonic()
        node.pull(["w"])
        longest_s = max(longest_s, time.monotonic() - asked_s)
        node.push({"w": -torch.ones(2000)})
        node.clock()
        steps += 1
    node.finish()
    return steps, longest_s


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_kills_at_any_moment_lose_nothing_and_stop_nobody() -> None:
    dice = random.Random(9)
    kills = [(dice.randrange(SERVERS), dice.uniform(0, 0.15),
              dice.choice([ps.Chain(), ps.Leader()]), dice.choice([ps.BSP(), ps.ASP()]))
             for _ in range(100)]
    with ThreadPoolExecutor(4) as at_once:  # most of a training's time is waiting for a lease
        for _ in at_once.map(lose_nothing, *zip(*kills, strict=True)):
            pass


def lose_nothing(victim: int, after_s: float, rule: ps.Replication,
                 consistency: ps.Consistency) -> None:
    """A training, a kill, and nobody is stopped."""
    result = run(killed_at, victim, after_s, rule, consistency, ranks=6, may_die=range(SERVERS),
                 trace=False)
    what = victim, after_s, rule, consistency
    copies, (log, *workers) = result.values[:SERVERS], result.values[SERVERS:]
    living = [copy for copy in copies if copy is not None]
    assert len(living) == SERVERS - (copies[victim] is None) == SERVERS - 1, what
    steps, longest_s = zip(*workers, strict=True)
    whole = [copy.pushes for copy in living if not copy.rejoined]
    assert set(whole) == {sum(steps)}, what  # each once
    assert len({copy.checksum for copy in living}) == 1, what
    assert max(longest_s) < 3, what
    assert log.overlaps() == [], what


def test_the_death_of_any_other_rank_still_ends_the_run() -> None:
    def dies(comm: Comm) -> None:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.recv_object(1 - comm.rank)

    with pytest.raises(RankDied, match="rank 1 died"):
        run(dies, ranks=2, may_die=[0])


def test_the_value_of_a_rank_that_died_is_none() -> None:
    def dies(comm: Comm) -> Any:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return comm.rank

    assert run(dies, ranks=3, may_die=[1]).values == [0, None, 2]


def test_who_was_not_ready_for_a_death_is_told_whose_it_was() -> None:
    def unready(comm: Comm) -> None:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.recv(torch.zeros(4), 1)

    with pytest.raises(RankFailed, match=r"raised RankDied, after rank 1 had died; "):
        run(unready, ranks=3, may_die=[1])


def test_a_wait_with_a_limit_tells_slow_from_dead() -> None:
    def waits(comm: Comm) -> Any:
        if comm.rank == 1:
            comm.recv_object(0)
            comm.send(torch.ones(1), 0)
            os.kill(os.getpid(), signal.SIGKILL)
        x, box = torch.zeros(1), []
        work = comm.irecv(x, 1)
        found = [comm.wait_any([work], 0.05)]
        comm.send("go on", 1)
        while not comm.wait_any([work], 0.05):
            pass
        found += [work.wait(), x.item()]
        for never in x, box, x:  # of a connection that is about to break, or has long been broken
            work = comm.irecv(never, 1)
            while not comm.wait_any([work], 0.05):
                pass
            with pytest.raises(RankDied, match="the connection to rank 1 has broken"):
                work.wait()
        return found

    assert run(waits, ranks=2, may_die=[1]).values == [[None, 1, 1.0], None]


@pytest.mark.parametrize("may_die", [[2], [0, 1], 5])
def test_those_who_may_die_are_some_of_the_ranks(may_die: Any) -> None:
    with pytest.raises(ConfigError, match="may_die"):
        run(lambda comm: None, ranks=2, may_die=may_die)
