"""What `Comm.begin` begins runs beside the rank, in order, and never in silence; on processes."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch

from dtlab import Comm, ConfigError, Deadlock, RankFailed, UnwaitedWork, run
from dtlab.collectives import all_reduce, barrier


def overlapping(comm: Comm) -> list[float]:
    """Two all-reduces on each of two groups that overlap, and one of all, all under way at once."""
    groups, under_way, sums = ([0, 1, 2], [1, 2, 3]), [], []
    for ranks in groups:
        if comm.rank in ranks:
            group = comm.subgroup(ranks)
            for turn in range(2):
                x = torch.full((10_000,), float(comm.rank + 10 * turn))
                under_way.append(group.begin(all_reduce, x, algorithm="ring"))
    sums.append(all_reduce(comm, torch.tensor([float(comm.rank)])).item())
    return sums + [work.wait().mean().item() for work in under_way]


def test_overlapped_all_reduces_on_overlapping_groups_give_the_right_sums() -> None:
    low, high = [3.0, 33.0], [6.0, 36.0]
    result = run(overlapping, ranks=4)
    assert result.values == [[6.0, *low], [6.0, *low, *high], [6.0, *low, *high], [6.0, *high]]
    streams = {(m.src, m.src_stream) for m in result.trace.transfers}
    assert {(1, 0), (1, 1), (1, 2), (0, 0), (0, 1)} <= streams
    for rank in range(4):
        assert 0 < result.trace.exposed_s(rank) <= result.elapsed_s


def test_what_is_begun_runs_in_order_and_its_value_and_error_come_out_of_wait() -> None:
    def work(comm: Comm) -> list[Any]:
        seen: list[int] = []

        def slow(stream: Comm, number: int, pause_s: float) -> int:
            time.sleep(pause_s)
            seen.append(number)
            if number == 1:
                raise ValueError("number 1")
            return number * stream.size

        begun = [comm.begin(slow, number, pause_s=0.05 / (number + 1)) for number in range(3)]
        with pytest.raises(ValueError, match="number 1"):
            begun[1].wait()
        return [begun[2].wait(), begun[0].wait(), begun[0].wait(), seen]

    assert run(work, ranks=2).values == [[4, 0, 0, [0, 1, 2]]] * 2


def test_a_stream_may_begin_another_one() -> None:
    def outer(stream: Comm) -> float:
        inner = stream.begin(all_reduce, torch.ones(3))
        return all_reduce(stream, torch.ones(2)).sum().item() + inner.wait().sum().item()

    assert run(lambda comm: comm.begin(outer).wait(), ranks=3).values == [15.0] * 3


def test_the_error_of_what_nobody_waited_for_ends_the_run() -> None:
    def work(comm: Comm) -> None:
        if comm.rank:
            comm.begin(lambda stream: 1 / 0)

    with pytest.raises(RankFailed, match="rank 1 raised ZeroDivisionError"):
        run(work, ranks=2)

    def forgotten(comm: Comm) -> None:
        comm.begin(all_reduce, torch.ones(2))

    with pytest.raises(UnwaitedWork, match=r"begin\(all_reduce, …\), at test_streams.py:"):
        run(forgotten, ranks=2)


def test_a_begun_collective_that_meets_nobody_stands_in_the_table() -> None:
    def work(comm: Comm) -> None:
        if comm.rank:
            comm.begin(all_reduce, torch.ones(3)).wait()

    with pytest.raises(Deadlock, match="0 returned without calling all_reduce") as caught:
        run(work, ranks=2, timeout=60)
    rows = [(row.rank, row.doing, row.peer) for row in caught.value.waiting]
    assert rows == [(0, "returned", ""), (1, "wait for stream 1", ""),
                    (1, "exchange in all_reduce (stream 1)", "0")]
    assert all("test_streams.py" in row.line for row in caught.value.waiting[1:])


def test_a_receive_from_anyone_never_takes_a_message_of_a_collective() -> None:
    def work(comm: Comm) -> list[float]:
        x = torch.zeros(4)
        pending = comm.irecv(x) if comm.rank == 0 else None
        total = all_reduce(comm, torch.ones(4), algorithm="flat").sum().item()
        if comm.rank == 1:
            comm.send(torch.full((4,), 7.0), 0)
        return [total, pending.wait() if pending else -1, x.sum().item()]

    assert run(work, ranks=3).values == [[12.0, 1, 28.0], [12.0, -1, 0.0], [12.0, -1, 0.0]]


def test_wait_any_tells_the_first_that_is_done_of_messages_and_begun_functions() -> None:
    def work(comm: Comm) -> list[Any]:
        if comm.rank:
            comm.recv_object(0)
            comm.send(torch.ones(2), 0)
            return []
        x = torch.zeros(2)
        message, pause = comm.irecv(x, 1), comm.begin(lambda stream: time.sleep(0.2))
        found = [comm.wait_any([message, pause], 0.0) is None,
                 comm.wait_any([message, pause]) is pause]
        comm.send("go", 1)
        found += [comm.wait_any([message]) is message, message.wait(), x.sum().item(), pause.wait()]
        return found

    assert run(work, ranks=2).values[0] == [True, True, True, 1, 2.0, None]


def test_waits_that_are_over_and_cancelled_messages_that_have_moved_keep_no_memory() -> None:
    def kept(comm: Comm) -> tuple[int, int]:
        other, apart = 1 - comm.rank, comm.split(0)
        assert apart is not None
        late, room = apart.irecv(torch.zeros(1), other), torch.zeros(1000)
        for _ in range(300):
            comm.isend(torch.ones(1000), other).cancel()
            comm.recv(room, other)
            assert comm.wait_any([late], timeout_s=0.0) is None
        barrier(comm)  # the other rank may still be asking
        apart.send(torch.zeros(1), other) if comm.rank else late.wait()
        apart.send(torch.zeros(1), other) if not comm.rank else late.wait()
        kinds = [(type(x), x.numel() if type(x) is torch.Tensor else 0) for x in gc.get_objects()]
        return kinds.count((threading.Event, 0)), kinds.count((torch.Tensor, 1000))

    assert all(count < 100 for counts in run(kept, ranks=2).values for count in counts)


def test_begin_takes_functions_only() -> None:
    with pytest.raises(ConfigError, match="begin takes a function"):
        run(lambda comm: comm.begin(3), ranks=1)
