"""What `begin` runs beside a rank: order, values, errors, deadlocks, prints and traces."""

from __future__ import annotations

import os
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch

import dtlab
from dtlab import Comm, Deadlock, RankFailed, ShapeMismatch, simulate
from dtlab.collectives import all_reduce, barrier, broadcast
from dtlab.topology import uniform
from tests.simulator.shared import Shared, pause

KINDS = pytest.mark.parametrize("strands", ["greenlet", "thread"])


def run(fn: Any, *args: Any, p: int = 2, **options: Any) -> Any:
    return simulate(fn, *args, network=uniform(p, 1e-3, 1e6), **{"echo": False} | options)


def bad(stream: Comm) -> None:
    raise KeyError("gone")


@KINDS
def test_two_overlapped_all_reduces_on_each_of_two_overlapping_groups(strands: str) -> None:
    def rank(comm: Comm) -> list[Any]:
        sums, works = [], []
        for members in ([0, 1, 2], [1, 2, 3]):
            if comm.rank not in members:
                continue
            group = comm.subgroup(members)
            for times in (1, 10):
                x = torch.full((5,), float(comm.rank * times))
                sums.append(x)
                works.append(group.begin(all_reduce, x))
        y = torch.tensor([float(comm.rank)])
        all_reduce(comm, y)  # meanwhile, on all
        for work, x in zip(works, sums, strict=True):
            assert work.wait() is x
        return [y.item(), *(x[0].item() for x in sums)]

    assert run(rank, p=4, strands=strands).values == [
        [6, 3, 30], [6, 3, 30, 6, 60], [6, 3, 30, 6, 60], [6, 6, 60]]


@KINDS
def test_a_stream_computes_while_its_rank_does_and_runs_in_order(strands: str) -> None:
    def step(stream: Comm, log: list[Any], name: str, seconds: float) -> str:
        pause(stream, name, seconds)
        log.append((name, stream.now()))
        return name.upper()

    def rank(comm: Comm) -> Any:
        log: list[Any] = []
        works = [comm.begin(step, log, name, seconds=s) for name, s in (("a", 3.0), ("b", 1.0))]
        pause(comm, "own", 2.0)
        log.append(("own", comm.now()))
        return log, [work.wait() for work in reversed(works)], comm.now()

    log, returned, now_s = run(rank, p=1, strands=strands).values[0]
    assert log == [("own", 2.0), ("a", 3.0), ("b", 4.0)]
    assert (returned, now_s) == (["B", "A"], 4.0)


@KINDS
def test_what_is_begun_within_a_stream_has_a_stream_of_its_own(strands: str) -> None:
    def outer(stream: Comm, x: torch.Tensor) -> float:
        work = stream.begin(all_reduce, x)
        barrier(stream)
        return work.wait().item()

    def rank(comm: Comm) -> Any:
        works = [comm.begin(outer, torch.ones(1)), comm.begin(outer, torch.ones(1) * 2)]
        return [work.wait() for work in works]

    result = run(rank, p=3, strands=strands)
    assert result.values == [[3, 6]] * 3
    assert {(m.label.split("(")[0], m.src_stream, m.dst_stream) for m in result.trace.transfers
            } == {("all_reduce", 2, 2), ("barrier", 1, 1)}


@KINDS
def test_the_error_of_a_begun_function_comes_out_of_wait(strands: str) -> None:
    def rank(comm: Comm) -> str:
        work = comm.begin(bad)
        with pytest.raises(KeyError, match="gone"):
            work.wait()
        return comm.begin(lambda stream: "goes on").wait()

    assert run(rank, strands=strands).values == ["goes on"] * 2


@KINDS
@pytest.mark.parametrize("ending", ["returns", "waits", "cancels"])
def test_an_error_that_nobody_waited_for_fails_the_run_at_its_end(
    strands: str, ending: str
) -> None:
    def rank(comm: Comm) -> None:
        if comm.rank == 1:
            work = comm.begin(bad)
            if ending == "cancels":
                work.cancel()
        elif ending == "waits":
            comm.recv(torch.zeros(1), 1)

    with pytest.raises(RankFailed, match="rank 1 raised KeyError: 'gone'") as caught:
        run(rank, strands=strands)
    assert 'raise KeyError("gone")' in caught.value.traceback_text


@KINDS
def test_a_begun_collective_that_meets_another_one_is_a_mismatch(strands: str) -> None:
    def rank(comm: Comm) -> None:
        x = torch.ones(4)
        comm.begin(all_reduce if comm.rank else broadcast, x).wait()

    with pytest.raises(ShapeMismatch, match=r"is in (broadcast|all_reduce)") as caught:
        run(rank, strands=strands)
    assert all(name in str(caught.value) for name in ("broadcast", "all_reduce"))


@KINDS
def test_a_begun_collective_that_meets_nobody_is_a_deadlock_in_the_table(strands: str) -> None:
    def rank(comm: Comm) -> None:
        if comm.rank:
            comm.begin(all_reduce, torch.ones(4)).wait()
        else:
            comm.begin(lambda stream: None).wait()  # its idle stream is no row

    with pytest.raises(Deadlock) as caught:
        run(rank, strands=strands)
    rows = caught.value.waiting
    assert [(row.rank, row.doing, row.peer) for row in rows] == [
        (0, "returned", ""), (1, "wait for stream 1", ""),
        (1, "exchange in all_reduce (stream 1)", "0")]
    line = rank.__code__.co_firstlineno + 2
    assert [row.line for row in rows] == ["", *[f"test_streams.py:{line} in rank"] * 2]


@KINDS
def test_a_run_ends_when_the_ranks_and_their_streams_have_ended(strands: str) -> None:
    def late(stream: Comm) -> None:
        pause(stream, "late", 5.0)
        done.append(stream.rank)

    def rank(comm: Comm) -> None:
        comm.begin(late).cancel()

    done = Shared()
    run(rank, strands=strands)
    assert sorted(done) == [0, 1]


@KINDS
def test_prints_in_a_stream_are_the_ranks(strands: str) -> None:
    def rank(comm: Comm) -> None:
        comm.begin(lambda stream: print("beside", stream.rank)).wait()
        print("after")

    assert run(rank, strands=strands).output == ["beside 0\nafter\n", "beside 1\nafter\n"]


@KINDS
def test_modes_of_a_stream_are_its_own(strands: str) -> None:
    def beside(stream: Comm) -> tuple[bool, bool]:
        with torch.no_grad():
            barrier(stream)
            return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    def rank(comm: Comm) -> Any:
        with torch.inference_mode():
            work = comm.begin(beside)
            barrier(comm)
            return work.wait(), torch.is_inference_mode_enabled()

    assert run(rank, strands=strands).values == [((False, False), True)] * 2


@KINDS
def test_a_stream_is_a_thread_of_its_ranks_process(strands: str) -> None:
    """Which shares random numbers, the default dtype, environment and loggers."""
    def rank(comm: Comm) -> list[Any]:
        name = ContextVar("name", default=0)
        name.set(comm.rank)
        np.random.seed(7)

        def beside(stream: Comm) -> list[Any]:
            os.environ["DTLAB_STREAM"] = f"{stream.rank}"
            torch.set_default_dtype(torch.float64)
            barrier(stream)
            return [torch.rand(1).item(), np.random.rand(), name.get()]

        seen: list[Any] = [torch.rand(1).item()]
        for _ in range(2):
            seen += comm.begin(beside).wait()
            seen += [torch.rand(1).item(), torch.ones(1).dtype, os.environ["DTLAB_STREAM"]]
        return seen

    assert run(rank, strands=strands).values == dtlab.run(rank, ranks=2).values


@KINDS
def test_wait_any_takes_sends_receives_and_begun_functions(strands: str) -> None:
    def beside(stream: Comm) -> str:
        pause(stream, "beside", 2.0)
        return "done"

    def rank(comm: Comm) -> Any:
        if comm.rank:
            pause(comm, "first", 1.0)
            comm.recv(torch.zeros(1), 0)
            pause(comm, "then", 3.0)
            comm.send(torch.ones(1), 0)
            return None
        x = torch.zeros(1)
        works = {"send": comm.isend(torch.ones(1), 1), "recv": comm.irecv(x, 1),
                 "begun": comm.begin(beside)}
        names = {work: name for name, work in works.items()}
        order = []
        while works:
            work = comm.wait_any([*works.values()])
            assert work is not None
            order.append((names[work], round(comm.now()), work.wait()))
            del works[names[work]]
        return order, comm.wait_any([], 1.0), x.item()

    order, nothing, x = run(rank, strands=strands).values[0]
    assert order == [("send", 1, 1), ("begun", 2, "done"), ("recv", 4, 1)]
    assert (nothing, x) == (None, 1)


@KINDS
def test_a_rank_that_crashes_takes_its_streams_with_it(strands: str) -> None:
    def beside(stream: Comm) -> None:
        for _ in range(3):
            pause(stream, "beside", 1.0)
            seen.append((stream.rank, stream.now()))

    def rank(comm: Comm) -> str:
        work = comm.begin(beside)
        pause(comm, "own", 1.5)
        pause(comm, "more", 0.1)
        work.wait()
        return "returned"

    seen = Shared()
    result = run(rank, crash={0: 3}, strands=strands)  # at 1.5 s
    assert result.values == [None, "returned"]
    assert seen == [(0, 1.0), (1, 1.0), (1, 2.0), (1, 3.0)]


@KINDS
def test_a_stream_that_crashes_takes_its_rank_with_it(strands: str) -> None:
    def rank(comm: Comm) -> str:
        if comm.rank == 0:
            work = comm.begin(lambda stream: stream.send(torch.ones(1), 1))
            work.wait()
        return "returned"

    assert run(rank, crash={0: 0}, strands=strands).values == [None, "returned"]


@KINDS
def test_streams_leave_equal_traces_bit_for_bit(strands: str) -> None:
    def rank(comm: Comm) -> float:
        works = [comm.begin(all_reduce, torch.ones(n)) for n in (100, 1000)]
        works += [comm.subgroup([0, 2]).begin(all_reduce, torch.ones(7))] if comm.rank != 1 else []
        all_reduce(comm, torch.ones(500))
        for work in works:
            work.wait()
        return comm.now()

    first, again = run(rank, p=3, gamma=1e-9), run(rank, p=3, gamma=1e-9, strands=strands)
    assert (first.values, first.trace.events) == (again.values, again.trace.events)
    assert {event.stream for event in first.trace.events} == {0, 1, 2}


def test_a_receive_from_anyone_never_catches_a_message_of_a_collective_or_a_stream() -> None:
    def rank(comm: Comm) -> tuple[int, float]:
        x = torch.zeros(1)
        pending = comm.irecv(x)  # from anyone
        all_reduce(comm, torch.ones(1))
        comm.begin(all_reduce, torch.ones(1)).wait()
        comm.subgroup([0, 1]).sendrecv(torch.ones(1), 1 - comm.rank, torch.ones(1), 1 - comm.rank)
        comm.send(torch.full((1,), 9.0), 1 - comm.rank)
        return pending.wait(), x.item()

    assert run(rank).values == [(1, 9), (0, 9)]


def test_a_collective_that_meets_a_plain_recv_is_a_deadlock_that_shows_both() -> None:
    def rank(comm: Comm) -> None:
        if comm.rank:
            comm.recv(torch.ones(1), 0)
        else:
            all_reduce(comm, torch.ones(1))

    with pytest.raises(Deadlock) as caught:
        run(rank)
    assert [row.doing for row in caught.value.waiting] == [
        "exchange in all_reduce", "recv"]


@KINDS
def test_messages_of_a_stream_never_meet_those_of_its_rank(strands: str) -> None:
    def swap(stream: Comm, x: torch.Tensor, y: torch.Tensor) -> None:
        stream.sendrecv(x, 1 - stream.rank, y, 1 - stream.rank)

    def rank(comm: Comm) -> list[float]:
        one, two, three = torch.ones(1), torch.ones(1) * 2, torch.ones(1) * 4
        got, beside = torch.zeros(1), torch.zeros(1)
        work = comm.begin(swap, two, beside)
        if comm.rank:  # the others' messages are first to be posted
            work.wait()
        all_reduce(comm, three)
        swap(comm, one, got)
        work.wait()
        return [got.item(), beside.item(), three.item()]

    assert run(rank, strands=strands).values == [[1, 2, 8]] * 2


@KINDS
def test_what_a_rank_has_waited_for_among_others_does_not_wake_it_later(strands: str) -> None:
    def sleep(stream: Comm, seconds: float) -> None:
        pause(stream, "sleep", seconds)

    def rank(comm: Comm) -> float:
        if comm.rank:
            for seconds in (1.0, 1.0):
                pause(comm, "first", seconds)
                comm.send(torch.ones(1), 0)
            return 0.0
        works = [comm.irecv(torch.zeros(1), 1), comm.irecv(torch.zeros(1), 1),
                 comm.begin(sleep, 3.0)]
        assert comm.wait_any(works) is works[0]
        pause(comm, "long", 9.0)
        now_s = comm.now()
        for work in works:
            work.wait()
        return now_s

    assert run(rank, strands=strands).values[0] == pytest.approx(10, abs=0.1)


def test_many_streams_may_begin_at_once():
    def several(comm: Comm) -> list[float]:
        x = [torch.ones(1) for _ in range(12)]
        ranks = list(range(comm.size))
        works = [comm.subgroup(ranks[i:] + ranks[:i]).begin(all_reduce, x[i]) for i in range(12)]
        for work in works:
            work.wait()
        return [float(each) for each in x]

    values = simulate(several, network=uniform(40, 1e-6, 1e9)).values
    assert values == [[40.0] * 12] * 40
