"""The short way over Gloo: what it refuses, what it leaves to the long way, what it bears."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dtlab import Comm, ConfigError, Deadlock, Recv, Send, ShapeMismatch, run


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


@pytest.mark.parametrize("count", [1, 2])
def test_after_a_refused_exchange_the_right_one_goes_through(count: int) -> None:
    """It has taken back all that it announced."""
    def work(comm: Comm) -> list[float]:
        side, rooms = comm.split(0), [torch.zeros(3) for _ in range(count)]
        assert side is not None
        *others, last = [torch.full((3,), n + 1.0) for n in range(count)]
        if comm.rank == 1:
            posted = [comm.irecv(room, 0) for room in rooms]
            posted += [comm.isend(x, 0) for x in (*others, last)]
            side.send("posted", 0)
            for message in posted:
                message.wait()
            return [room.sum().item() for room in rooms]
        side.recv_object(1)
        fit = [*(Recv(room, 1) for room in rooms), *(Send(x, 1) for x in others)]
        with pytest.raises(ShapeMismatch):
            comm.exchange(*fit, Send(torch.ones(4), 1))
        comm.exchange(*fit, Send(last, 1))
        return [room.sum().item() for room in rooms]

    assert run(work, ranks=2).values == [[3.0, 6.0][:count]] * 2


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
            comm.exchange(*(Recv(y.clone(), 1) for _ in range(1 + many)), Send(torch.ones(4), 1))
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
        if not found:
            pytest.skip("this torch gives Gloo's threads no name")
        assert set(found) == {os.SCHED_BATCH}


def test_large_objects_cross_whatever_was_sent_before() -> None:
    """Both announce messages to the other, which must not be taken for answers."""
    def swap(comm: Comm) -> list[int]:
        for turn in range(4):
            if comm.rank == turn % 2:  # a large tensor: its announcement has one tag, objects' two
                comm.send(torch.ones(600_000), 1 - comm.rank)
            else:
                comm.recv(torch.ones(600_000), 1 - comm.rank)
            got: list[bytes] = []
            comm.exchange(Send(bytes(3_000_000 + comm.rank), 1 - comm.rank), Recv(got, None))
        return [len(got[0])]

    assert run(swap, ranks=2).values == [[3_000_001], [3_000_000]]
