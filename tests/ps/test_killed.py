"""On processes: SIGKILL of a server; training ends, and nothing acknowledged is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice, product
from threading import Timer
from typing import Any

import pytest
import torch

from dtlab import Comm, ConfigError, RankDied, RankFailed, ps, run

SERVERS = 3
KINDS = list(product(range(SERVERS), [ps.Chain(), ps.Leader()], [ps.BSP(), ps.ASP()]))


def killed_at(comm: Comm, victim: int, after_s: float, rule: ps.Replication,
              consistency: ps.Consistency) -> Any:
    """A short training; `victim` is killed so long after all have begun."""
    pids = comm._all_gather_objects(os.getpid())
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
    node.init({"w": torch.zeros(20_000)})
    steps, longest_s, begin_s = 0, 0.0, time.monotonic()
    while steps < 20 or time.monotonic() < begin_s + after_s + 0.05:
        asked_s = time.monotonic()
        weight = node.pull(["w"])["w"]
        longest_s = max(longest_s, time.monotonic() - asked_s)
        assert torch.equal(weight, weight[:1].expand(20_000))
        node.push({"w": -torch.ones(20_000)})
        node.clock()
        steps += 1
    node.finish()
    return steps, longest_s


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kills_at_any_moment_lose_nothing_and_stop_nobody(request: pytest.FixtureRequest) -> None:
    """Simulated deaths go through every event; here some are real: --kills says how many."""
    dice = random.Random(9)
    kills = [(victim, dice.uniform(0, 0.15), rule, consistency) for victim, rule, consistency
             in islice(cycle(KINDS), request.config.getoption("kills"))]
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
    assert copies[victim] is None, what
    assert victim in log.dead, what
    living = [copy for copy in copies if copy is not None]
    assert len(living) == SERVERS - 1, what
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


@pytest.mark.parametrize("may_die", [[2], [0, 5], 5])
def test_those_who_may_die_are_some_of_the_ranks(may_die: Any) -> None:
    with pytest.raises(ConfigError, match="may_die"):
        run(lambda comm: None, ranks=2, may_die=may_die)
