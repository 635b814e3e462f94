"""Communicators after a death, on processes and in the simulator."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtlab
from dtlab import Comm, ConfigError, RankDied, RankFailed, Recv, Send
from dtlab.collectives import all_gather, all_reduce, broadcast
from dtlab.processes import survivors
from dtlab.processes.control_channel import ControlChannel
from dtlab.processes.status_writer import Threads
from dtlab.processes.store import RankStore, StoreServer

RANKS = 4
NETWORK = dtlab.topology.uniform(RANKS, 1e-5, 1e9)


def dies(comm: Comm, victim: int) -> None:
    """End the process of `victim`; a simulated one crashes here."""
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)


def on(backend: str, fn: Callable[[Comm], Any], victim: int, **options: Any) -> list[Any]:
    """Values of `fn` on ranks of which `victim` dies at its first event."""
    if backend == "simulator":
        return dtlab.simulate(fn, network=NETWORK, crash={victim: 0}, detect_s=1e-3,
                              **options).values

    def with_death(comm: Comm) -> Any:
        dies(comm, victim)
        return fn(comm)

    return dtlab.run(with_death, ranks=RANKS, may_die=range(RANKS), timeout=20).values


class NeverOver:
    """The handle of a send that Gloo has forgotten, as it may when the peer dies."""

    def wait(self) -> None:
        threading.Event().wait()


@pytest.mark.parametrize("anew", [False, True])
def test_a_send_that_gloo_forgets_ends_with_its_peer(anew: bool, tmp_path: Path) -> None:
    """Also that of a rank that was started anew."""
    def body(comm: Comm) -> bool:
        if anew and comm.global_ranks[comm.rank] == 1:
            while not comm.joining():
                time.sleep(0.01)
            comm = comm.shrink()
        elif anew and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            dies(comm, 0)
        comm.endpoint.transport.start = lambda operations: [NeverOver() for _ in operations]  # type: ignore[attr-defined]
        dies(comm, 1)
        with pytest.raises(RankDied, match="rank 1"):
            comm.send(torch.ones(2), 1)
        return True

    values = dtlab.run(body, ranks=2, may_die=range(2), max_restarts=int(anew), timeout=20).values
    assert values == [True, None]


def test_who_looks_for_the_address_of_a_rank_that_has_died_is_told_so() -> None:
    """Else it would wait, and hold up its rank, which the others wait for."""
    server, pairs = StoreServer(2), [socket.socketpair() for _ in range(2)]
    ranks = [RankStore(ControlChannel(there)) for _, there in pairs]
    ends = [ControlChannel(here) for here, _ in pairs]
    told: list[str] = []

    def asked(rank: int, question: Callable[[], object]) -> threading.Thread:
        """The thread in which `rank` asks it, once the server has it before it."""
        thread = threading.Thread(target=question, daemon=True)
        thread.start()
        select.select([ends[rank]], [], [])
        server.serve(ends[rank])
        return thread

    def look() -> None:
        try:
            ranks[0].get("survivors 1/where is rank 1?")
        except dist.DistStoreError as error:
            told.append(str(error))

    for rank in (0, 1):
        asked(rank, partial(ranks[rank].shrink, rank))
    server.rank_ended(1, died=True)
    asked(0, look).join(5)
    assert told == ["a rank has died"]
    asked(0, partial(ranks[0].shrink, 0)).join(5)
    asked(0, look).join(5)  # Gloo's thread of the time before
    assert told == ["a rank has died"] * 2


def test_a_connection_is_refused_before_the_launcher_knows_of_the_death(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Then ranks meet again; if nobody has died, the refusal is the failure."""
    class Refused(dist.ProcessGroupGloo):
        def __init__(self, *_: Any) -> None:
            raise RuntimeError("Connection refused")

    monkeypatch.setattr(dist, "ProcessGroupGloo", Refused)
    monkeypatch.setattr(survivors, "_TOLD_WITHIN_S", 1.0)
    store: Any = dist.HashStore()
    threading.Timer(0.2, store.set, ("broken 3", "")).start()
    with pytest.raises(survivors._DiedMeanwhile):
        survivors._group(store, 3, [0, 1], 0, Threads())
    with pytest.raises(RuntimeError, match="refused"):
        survivors._group(store, 4, [0, 1], 0, Threads())


def test_ranks_that_have_met_may_return_before_another_notices(
        monkeypatch: pytest.MonkeyPatch) -> None:
    class Formed:
        _Options = dist.ProcessGroupGloo._Options  # type: ignore[attr-defined]
        create_device = dist.ProcessGroupGloo.create_device

        def __init__(self, *_: Any) -> None:
            pass

    class Store(dist.HashStore):  # type: ignore[name-defined, misc]
        """Rank 1 forms the group, and returns, right after rank 0 has asked whether it has."""

        def check(self, keys: Any) -> bool:
            there: bool = super().check(keys)
            if "formed 3/1" in keys:
                self.set("formed 3/1", "")
                self.set("broken 3", "")
            return there

    monkeypatch.setattr(dist, "ProcessGroupGloo", Formed)
    store: Any = Store()
    assert isinstance(survivors._group(store, 3, [0, 1], 0, Threads()), Formed)


@pytest.mark.parametrize("backend", ["simulator", "gloo"])
@pytest.mark.parametrize("victim", [0, 2, 3])
def test_every_collective_works_on_the_communicator_of_the_survivors(
        backend: str, victim: int) -> None:
    def body(comm: Comm) -> Any:
        with pytest.raises(RankDied):
            all_reduce(comm, torch.ones(9), algorithm="ring")  # in which each waits for the next
        left = comm.shrink()
        everyone = all_gather(left, torch.tensor([comm.rank]))
        x = torch.full((700_000,), float(comm.rank))  # large: read from the sender's memory
        all_reduce(left, x, algorithm="ring")
        pair = left.subgroup([left.size - 1, 0]) if left.rank in (0, left.size - 1) else None
        y = torch.tensor([comm.rank])
        if pair:
            broadcast(pair, y)
        begun = left.begin(lambda stream: all_reduce(stream, torch.ones(3)))
        z = torch.zeros(1)
        left.sendrecv(torch.ones(1), (left.rank + 1) % left.size, z, None)
        return (left.global_ranks, everyone.flatten().tolist(), float(x[0]), y.item(),
                begun.wait().tolist(), z.item(), left.joining())

    living = [rank for rank in range(RANKS) if rank != victim]
    values = on(backend, body, victim)
    assert values.pop(victim) is None
    for rank, value in zip(living, values, strict=True):
        last = living[-1] if rank in (living[0], living[-1]) else rank
        assert value == (tuple(living), living, float(sum(living)), last, [3.0] * 3, 1.0, False)


@pytest.mark.parametrize("backend", ["simulator", "gloo"])
def test_nothing_of_the_old_communicator_arrives_later(backend: str) -> None:
    """A receive that was under way when its rank left changes its tensor no more."""
    def body(comm: Comm) -> Any:
        mine = torch.zeros(1000)
        late = comm.irecv(mine, 1) if comm.rank == 2 else None
        if comm.rank in (1, 2):
            with pytest.raises(RankDied):
                comm.recv(torch.zeros(1), 3)
        left = comm.shrink()
        all_reduce(left, torch.ones(1))
        if comm.rank == 2:
            with pytest.raises(RankDied):
                late.wait()  # type: ignore[union-attr]
        if comm.rank == 1:
            with pytest.raises(RankDied):
                comm.send(torch.ones(1000), 2)
        for call in (lambda: all_reduce(comm, torch.ones(1)),  # which makes a context of it
                     lambda: all_reduce(comm.subgroup([0, 1, 2]), torch.ones(1)),
                     lambda: comm.split(0)):
            with pytest.raises(RankDied):
                call()
        all_reduce(left, torch.ones(1))
        return float(mine.sum())

    assert on(backend, body, 3)[:3] == [0.0, 0.0, 0.0]


def test_what_moves_while_its_receiver_leaves_changes_nothing_when_it_arrives() -> None:
    def body(comm: Comm) -> float:
        mine = torch.zeros(1000)
        ops = {1: [Send(torch.ones(1000), 2)], 2: [Recv(mine, 1), Recv(torch.zeros(1), 3)]}
        with pytest.raises(RankDied):
            comm.exchange(*ops.get(comm.rank, [Recv(torch.zeros(1), 3)]))
        left = comm.shrink()
        with left.compute("longer than the message takes", 20.0):
            pass
        return float(mine.sum())

    slow = dtlab.topology.uniform(RANKS, 1e-5, 400.0)  # the message takes ten seconds
    values = dtlab.simulate(body, network=slow, crash={3: 0}, detect_s=1.0).values
    assert values == [0.0, 0.0, 0.0, None]


@pytest.mark.parametrize("backend", ["simulator", "gloo"])
def test_a_rank_that_returned_is_not_waited_for(backend: str) -> None:
    def body(comm: Comm) -> Any:
        if comm.rank == 1:
            return "early"
        if backend == "gloo":
            time.sleep(0.2)
        with comm.compute("work", 1.0):
            pass
        with pytest.raises(RankDied):
            comm.recv(torch.zeros(1), 0)
        return comm.shrink().global_ranks

    assert on(backend, body, 0) == [None, "early", (2, 3), (2, 3)]


@pytest.mark.parametrize("backend", ["simulator", "gloo"])
@pytest.mark.parametrize("posted", [False, True])
def test_who_receives_from_anyone_is_told_of_a_death(backend: str, posted: bool) -> None:
    """It may be the one that would have sent."""
    def body(comm: Comm) -> Any:
        work = comm.irecv(torch.zeros(1), None)
        if posted:
            comm.wait_any([work])
        with pytest.raises(RankDied, match="a rank has broken"):
            work.wait()
        return comm.shrink().global_ranks

    assert on(backend, body, 2) == [(0, 1, 3), (0, 1, 3), None, (0, 1, 3)]


def test_a_session_does_not_shrink() -> None:
    """Its next call would find some ranks in the new group, and others in the old one."""
    with dtlab.Session(2) as session, pytest.raises(RankFailed, match="session can't shrink"):
        session.run(lambda comm: comm.shrink().size)


@pytest.mark.parametrize("restarts", [0, 4])
def test_all_may_die_but_then_the_run_says_so(restarts: int) -> None:
    def body(comm: Comm) -> None:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankDied, match=r"rank . died: killed by SIGKILL"):
        dtlab.run(body, ranks=2, may_die=range(2), max_restarts=restarts)


def test_the_last_to_go_on_may_be_a_rank_that_was_started_anew(tmp_path: Path) -> None:
    def body(comm: Comm) -> Any:
        if comm.global_ranks[comm.rank] == 0:
            if (tmp_path / "died").exists():
                with pytest.raises(RankDied):
                    comm.recv_object(1)
                return comm.shrink().global_ranks
            (tmp_path / "died").touch()
        else:
            while not comm.joining():
                time.sleep(0.01)
            comm.shrink()
        return os.kill(os.getpid(), signal.SIGKILL)

    assert dtlab.run(body, ranks=2, may_die=range(2), max_restarts=1).values == [(0,), None]


def test_a_rank_that_dies_again_and_again_is_started_so_often_and_no_more(tmp_path: Path) -> None:
    def body(comm: Comm) -> Any:
        quiet = 0  # steps since the last death
        while True:
            if comm.global_ranks[comm.rank] == 1:
                (tmp_path / str(os.getpid())).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                quiet += len(list(tmp_path.iterdir())) >= 4 and comm.size == 2
                told = torch.tensor([int(comm.joining()), -int(quiet > 150)])
                all_reduce(comm, told, "max", algorithm="recursive_doubling")
                if told[1] == -1:  # none has joined for so long
                    return comm.global_ranks
                time.sleep(0.005)
                if told[0]:
                    comm = comm.shrink()
            except RankDied:
                comm = comm.shrink()

    values = dtlab.run(body, ranks=3, may_die=[1], max_restarts=3, timeout=30).values
    assert values == [(0, 2), None, (0, 2)]
    assert len(list(tmp_path.iterdir())) == 4


def test_without_a_run_of_its_own_a_communicator_does_not_shrink() -> None:
    def body(comm: Comm) -> str:
        try:
            comm.subgroup([0, 1]).shrink()
        except ConfigError as error:
            return str(error)
        return ""

    for values in (dtlab.run(body, ranks=2).values, dtlab.simulate(
            body, network=dtlab.topology.uniform(2, 1e-6, 1e9)).values):
        assert "only the communicator of a whole run can shrink" in values[1]


@pytest.mark.parametrize("options", [{"detect_s": -1}, {"restart_s": float("nan")},
                                     {"detect_s": "soon"}])
def test_what_makes_no_sense_is_refused(options: Any) -> None:
    with pytest.raises(ConfigError):
        dtlab.simulate(lambda comm: None, network=NETWORK, **options)
    with pytest.raises(ConfigError):
        dtlab.run(lambda comm: None, max_restarts=-1)


@pytest.mark.parametrize("backend", ["simulator", "processes"])
def test_a_stream_does_nothing_after_a_death(backend: str) -> None:
    """Others may be in the call that failed still: they would take the next one's messages."""
    def body(comm: Comm) -> list[int]:
        x, done = torch.zeros(1), list[int]()
        if comm.rank == 1:
            comm.send(x, 0)
        if comm.rank == 0:
            works = [comm.begin(lambda stream: stream.recv(x, 1)),
                     comm.begin(lambda _: done.append(1))]
            for work in works:
                with pytest.raises(RankDied):
                    work.wait()
        return done

    assert on(backend, body, victim=1) == [[], None, [], []]
