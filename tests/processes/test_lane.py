"""The short way over Gloo: what it refuses, what it leaves to the long way, what it bears."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dtlab import Comm, ConfigError, Deadlock, Recv, Send, ShapeMismatch, run
from dtlab.processes.communicator import GlooComm
from dtlab.relay import one_by_one, relay


def test_odd_tensors_arrive_as_they_are() -> None:
    def work(comm: Comm) -> bool:
        other, wave = 1 - comm.rank, torch.tensor([1 + 2j, 3 - 1j])
        odd = [torch.arange(6.0).view(2, 3).T, wave, wave.conj(), wave.conj().imag[:1],
               torch.zeros(0), torch.tensor(5), torch.tensor([True, False]),
               torch.tensor([1, 2], dtype=torch.uint16)]
        rooms = [torch.zeros(x.shape, dtype=x.dtype) for x in odd]
        def arrived() -> bool:
            return all(torch.equal(x.resolve_conj().resolve_neg(), room)
                       and room.zero_() is room for x, room in zip(odd, rooms, strict=True))

        for x, room in zip(odd, rooms, strict=True):
            comm.sendrecv(x, other, room, other)
        together = arrived()
        for x, room in zip(odd, rooms, strict=True):
            for turn in (0, 1):
                comm.send(x, other) if comm.rank == turn else comm.recv(room, other)
        one_by_one = arrived()
        comm.exchange(*(Send(x, other) for x in odd), *(Recv(room, other) for room in rooms))
        return together and one_by_one and arrived()

    assert run(work, ranks=2).values == [True, True]


def test_a_refused_exchange_of_many_takes_back_all_that_it_announced() -> None:
    def work(comm: Comm) -> list[float]:
        side, rooms = comm.split(0), [torch.zeros(3) for _ in range(2)]
        assert side is not None
        ones, twos = torch.ones(3), torch.full((3,), 2.0)
        if comm.rank == 1:
            posted = [comm.irecv(room, 0) for room in rooms]
            posted += [comm.isend(ones, 0), comm.isend(twos, 0)]
            side.send("posted", 0)
            for message in posted:
                message.wait()
            return [room.sum().item() for room in rooms]
        side.recv_object(1)
        receives = [Recv(room, 1) for room in rooms]
        with pytest.raises(ShapeMismatch):
            comm.exchange(*receives, Send(ones, 1), Send(torch.ones(4), 1))
        comm.exchange(*receives, Send(ones, 1), Send(twos, 1))
        return [room.sum().item() for room in rooms]

    assert run(work, ranks=2).values == [[3.0, 6.0], [3.0, 6.0]]


@pytest.mark.parametrize("peer", [True, 1.0, [1], "1", 2, -1, 0])
def test_what_is_no_other_rank_is_refused_however_often_it_was_one(peer: Any) -> None:
    def work(comm: Comm) -> None:
        x, y = torch.ones(3), torch.ones(3)
        comm.sendrecv(x, 1 - comm.rank, y, 1 - comm.rank)  # now there is a lane
        if comm.rank == 0:
            for dst, src in ((peer, 1), (1, peer)):
                with pytest.raises(ConfigError, match="rank 0: can't"):
                    comm.sendrecv(x, dst, y, src)

    run(work, ranks=2)


def test_after_a_refused_exchange_the_right_one_goes_through() -> None:
    def work(comm: Comm) -> float:
        side, y = comm.split(0), torch.zeros(3)
        assert side is not None
        if comm.rank == 1:
            posted = [comm.irecv(y, 0), comm.isend(torch.full((3,), 7.0), 0)]
            side.send("posted", 0)
            for message in posted:
                message.wait()
            return y.sum().item()
        side.recv_object(1)
        with pytest.raises(ShapeMismatch):
            comm.sendrecv(torch.ones(4), 1, y, 1)
        comm.sendrecv(torch.ones(3), 1, y, 1)
        return y.sum().item()

    assert run(work, ranks=2).values == [21.0, 3.0]


@pytest.mark.parametrize("many", [False, True])
def test_a_refused_exchange_does_not_pass_for_a_receive(many: bool) -> None:
    def work(comm: Comm, many: bool) -> None:
        side, y = comm.split(0), torch.zeros(3)
        assert side is not None
        if comm.rank == 1:
            wanted = comm.irecv(y, 0)
            side.send("posted", 0)
            wanted.wait()
            comm.send(y, 0)  # which nobody will receive: rank 0 was refused
            return
        side.recv_object(1)
        with pytest.raises(ShapeMismatch):
            comm.exchange(*[Recv(y, 1)] * (1 + many), Send(torch.ones(4), 1))
        comm.send(y, 1)

    with pytest.raises(Deadlock):  # not a RunTimeout, as if somebody might
        run(work, many, ranks=2, timeout=20)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has batch threads")
def test_gloos_threads_push_nobody_aside() -> None:
    def policies(comm: Comm) -> list[int]:
        threads = Path("/proc/self/task").iterdir()
        return [os.sched_getscheduler(int(thread.name)) for thread in threads
                if (thread / "comm").read_text().startswith("gloo")]

    for found in run(policies, ranks=2).values:
        assert found
        assert set(found) == {os.SCHED_BATCH}


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_relay_is_as_many_exchanges(ranks: int) -> None:
    def work(comm: Comm) -> bool:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        sizes, all_right = [3, 0, 4, 1, 3], True
        for how in (relay, one_by_one, relay):
            moves = [(torch.full((n,), 10.0 * comm.rank + i), torch.zeros(n))
                     for i, n in enumerate(sizes)]
            for i, into in enumerate(how(comm, iter(moves), right, left)):
                all_right &= into is moves[i][1] and bool((into == 10.0 * left + i).all())
        comm.sendrecv(torch.ones(2), right, into := torch.zeros(2), left)  # the count is right
        return all_right and into.sum().item() == 2

    result = run(work, ranks=ranks)
    assert all(result.values)
    assert result.trace.messages() == 16 * ranks
    assert all(event.end_s >= event.start_s for event in result.trace.events)


def test_a_relay_meets_single_messages_and_tensors_that_need_the_long_way() -> None:
    def work(comm: Comm) -> list[float]:
        rooms = [torch.zeros(4) for _ in range(3)]
        if comm.rank == 0:
            for room in rooms:
                comm.recv(room, 1)
                comm.send(room * 2, 1)
        else:
            gaps = torch.arange(24.0).view(4, 6).T
            list(relay(comm, [(gaps[i], room) for i, room in enumerate(rooms)], 0, 0))
        return [room.sum().item() for room in rooms]

    assert run(work, ranks=2).values == [[36.0, 40.0, 44.0], [72.0, 80.0, 88.0]]


def test_a_relay_that_does_not_fit_is_refused_and_takes_back_what_it_announced() -> None:
    def work(comm: Comm) -> float:
        other, side = 1 - comm.rank, comm.split(0)
        assert side is not None
        if comm.rank == 1:
            posted = [comm.irecv(torch.zeros(3), 0), comm.isend(torch.ones(3), 0)]
            side.send("posted", 0)
            for message in posted:
                message.wait()
            return 3.0
        side.recv_object(1)
        with pytest.raises(ShapeMismatch):
            list(relay(comm, [(torch.ones(4), torch.zeros(3))], other, other))
        list(relay(comm, [(torch.ones(3), into := torch.zeros(3))], other, other))
        assert isinstance(comm, GlooComm)
        assert (comm.sent[other], comm.received[other]) == (1, 1)
        return into.sum().item()

    assert run(work, ranks=2).values == [3.0, 3.0]


def test_whoever_takes_long_between_two_moves_is_not_called_deadlocked() -> None:
    def work(comm: Comm) -> int:
        right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        moves = [(torch.ones(2), torch.zeros(2)) for _ in range(5)]
        for step, _ in enumerate(relay(comm, moves, right, left)):
            if comm.rank == 0 and step == 2:
                time.sleep(1.5)  # three times what must have passed before a hang is called one
        return step

    assert run(work, ranks=3).values == [4, 4, 4]


def test_a_rank_that_never_joins_a_relay_is_named() -> None:
    def work(comm: Comm) -> None:
        if comm.rank != 2:
            right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
            list(relay(comm, [(torch.ones(2), torch.zeros(2)) for _ in range(4)], right, left))

    with pytest.raises(Deadlock, match="2  returned"):
        run(work, ranks=3, timeout=20)
