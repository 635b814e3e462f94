"""Stretches in which a strand only waited; work that nobody waited for; receives cancelled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtlab
from dtlab import Comm, Deadlock, RankFailed, Recv, Send, UnwaitedWork, simulate
from dtlab.collectives import all_reduce
from dtlab.simulator import lines
from dtlab.topology import uniform
from tests.simulator.shared import pause

KINDS = pytest.mark.parametrize("strands", ["greenlet", "thread"])


def run(fn: Any, *args: Any, p: int = 2, **options: Any) -> Any:
    return simulate(fn, *args, network=uniform(p, 1.0, 100.0), **{"echo": False} | options)


def bytes_(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.uint8)


def waits(result: Any) -> list[tuple[Any, ...]]:
    return [tuple(wait) for wait in result.trace.waits]


# ---- waits in the trace ------------------------------------------------------------------------


@KINDS
def test_a_wait_lasts_from_the_call_to_the_message(strands: str) -> None:
    def rank(comm: Comm) -> None:
        if comm.rank:
            pause(comm, "first", 5.0)
            comm.labelled("push").recv(bytes_(100), 0)
        else:
            work = comm.labelled("push").isend(bytes_(100), 1)
            pause(comm, "meanwhile", 2.0)
            work.wait()

    result = run(rank, strands=strands)
    assert waits(result) == [(0, "wait", 2.0, 7.0, "push", 0), (1, "wait", 5.0, 7.0, "push", 0)]
    assert [result.trace.exposed_s(r) for r in (0, 1)] == [5.0, 2.0]


def test_a_ring_without_gamma_is_one_wait_a_rank_and_with_gamma_one_a_message() -> None:
    def rank(comm: Comm) -> None:
        all_reduce(comm, torch.ones(400), algorithm="ring")

    result = run(rank, p=4)
    assert [(w.rank, w.start_s, w.end_s) for w in result.trace.waits] == [
        (r, 0.0, result.elapsed_s) for r in range(4)]
    assert all(w.label.startswith("all_reduce(") for w in result.trace.waits)
    with_gamma = run(rank, p=4, gamma=0.5).trace
    assert [len([w for w in with_gamma.waits if w.rank == r]) for r in range(4)] == [4] * 4
    for r in range(4):  # time is waits and reductions, and nothing else
        reducing_s = sum(s.end_s - s.start_s for s in with_gamma.spans if s.rank == r)
        waiting_s = sum(w.end_s - w.start_s for w in with_gamma.waits if w.rank == r)
        assert with_gamma.exposed_s(r) == pytest.approx(waiting_s)
        assert waiting_s + reducing_s == pytest.approx(result.elapsed_s + 3 * 400 * 0.5)


@KINDS
def test_a_rank_that_waits_for_its_stream_is_exposed_only_while_neither_computes(
    strands: str,
) -> None:
    def beside(stream: Comm) -> None:
        stream.sendrecv(bytes_(100), 1 - stream.rank, bytes_(100), 1 - stream.rank)  # to 2 s
        with stream.compute("beside", 4.0):  # to 6 s
            pass

    def rank(comm: Comm) -> None:
        work = comm.begin(beside)
        pause(comm, "own", 1.5)
        work.wait()

    result = run(rank, strands=strands)
    assert waits(result) == [
        (0, "wait", 0.0, 2.0, "", 1), (1, "wait", 0.0, 2.0, "", 1),
        (0, "wait", 1.5, 6.0, "", 0), (1, "wait", 1.5, 6.0, "", 0)]
    assert [result.trace.exposed_s(r) for r in (0, 1)] == [0.5, 0.5]


def test_a_wait_that_is_given_up_counts_and_one_that_takes_no_time_does_not() -> None:
    def rank(comm: Comm) -> None:
        if comm.rank == 0:
            work = comm.irecv(bytes_(0), 1)
            assert comm.wait_any([work], 3.0) is None
            work.cancel()
            assert comm.wait_any([], 0.0) is None

    assert waits(run(rank)) == [(0, "wait", 0.0, 3.0, "", 0)]


def test_without_a_trace_there_are_no_waits() -> None:
    result = run(lambda comm: all_reduce(comm, torch.ones(4)), trace=False)
    assert (result.trace.waits, result.elapsed_s > 0) == ([], True)


# ---- work that nobody waited for ---------------------------------------------------------------


def forgotten(comm: Comm, what: str) -> None:
    other = 1 - comm.rank
    if comm.rank == 0:
        comm.recv(bytes_(40), other) if what == "isend" else comm.send(bytes_(40), other)
    elif what == "isend":
        comm.isend(bytes_(40), other)
    elif what == "irecv":
        comm.irecv(bytes_(40), other)
    elif what == "irecv from anyone":
        comm.irecv(bytes_(40))


@KINDS
@pytest.mark.parametrize(("what", "said", "line"), [
    ("isend", "isend to 0 of 40 bytes", 5), ("irecv", "irecv from 0 of 40 bytes", 7),
    ("irecv from anyone", "irecv from 0 of 40 bytes", 9),
])
def test_a_message_that_nobody_waited_for_is_an_error_that_names_the_line(
    what: str, said: str, line: int, strands: str
) -> None:
    at = f"test_waits.py:{forgotten.__code__.co_firstlineno + line} in forgotten"
    with pytest.raises(RankFailed) as caught:
        run(forgotten, what, strands=strands)
    assert isinstance(caught.value, UnwaitedWork)
    assert caught.value.rank == 1
    assert f"rank 1 returned without waiting for its {said}, at {at}; wait" in str(caught.value)


def test_so_is_one_that_met_nobody_and_one_within_a_group_goes_by_the_numbers_of_the_run() -> None:
    def rank(comm: Comm) -> None:
        if comm.rank == 2:
            comm.subgroup([3, 2]).isend(bytes_(3), 0)
            comm.irecv([])

    with pytest.raises(RankFailed, match="returned without waiting for its isend to 3 of 3 bytes"):
        run(rank, p=4)


@pytest.mark.parametrize("where", ["greenlet", "thread", "processes"])
def test_what_wait_any_returns_is_waited_for_unless_it_failed(where: str) -> None:
    def rank(comm: Comm, fails: bool) -> float:
        x = torch.zeros(1)
        if comm.rank:
            return comm.wait_any([comm.irecv(x, 0)]) and x.item()
        comm.send(torch.ones(1), 1)
        comm.wait_any([comm.begin(lambda stream: 1 / 0 if fails else 1)])
        return 0.0

    def go(fails: bool) -> Any:
        if where == "processes":
            return dtlab.run(rank, fails, ranks=2, echo=False).values
        return run(rank, fails, strands=where).values

    assert go(fails=False) == [0.0, 1.0]
    with pytest.raises(RankFailed, match="rank 0 raised ZeroDivisionError"):
        go(fails=True)


@KINDS
def test_so_is_a_function_that_has_ended_well(strands: str) -> None:
    def rank(comm: Comm) -> None:
        comm.begin(all_reduce, torch.ones(1))

    line = rank.__code__.co_firstlineno + 1
    with pytest.raises(RankFailed, match=r"rank 0 returned without waiting for its begin\("
                                         rf"all_reduce, …\), at test_waits\.py:{line} in rank; "):
        run(rank, strands=strands)


def test_what_a_rank_raises_and_a_deadlock_come_first() -> None:
    def raises(comm: Comm) -> None:
        comm.isend(bytes_(1), 1 - comm.rank)
        raise KeyError("own")

    def waits_forever(comm: Comm) -> None:
        comm.isend(bytes_(1), 1 - comm.rank)
        comm.recv([], 1 - comm.rank) if comm.rank else comm.recv(bytes_(1), 1)
        comm.recv(bytes_(1), 1 - comm.rank)

    with pytest.raises(RankFailed, match="KeyError"):
        run(raises)
    with pytest.raises((Deadlock, RankFailed)) as caught:
        run(waits_forever)
    assert "without waiting" not in str(caught.value)


def test_a_rank_that_crashed_owes_nothing() -> None:
    def rank(comm: Comm) -> None:
        if comm.rank:
            comm.isend(bytes_(1), 0)
            comm.send(bytes_(1), 0)

    assert run(rank, crash={1: 1}).values == [None, None]


def test_works_that_are_waited_for_or_cancelled_and_whole_calls_are_no_error() -> None:
    def rank(comm: Comm) -> None:
        other = 1 - comm.rank
        x = bytes_(4)
        works = [comm.isend(x, other), comm.irecv(bytes_(4), other)]
        for work in reversed(works):
            work.wait()
        comm.isend(x, other).cancel()
        comm.irecv(bytes_(4), other).cancel()
        comm.begin(lambda stream: None).cancel()
        comm.exchange(Send(x, other), Recv(bytes_(4), other))

    run(rank, eager_bytes=100)


def test_lines_cost_nothing_until_they_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(lines, "shown_name", lambda file: shown.append(file) or file)

    def rank(comm: Comm) -> None:
        comm.irecv(bytes_(1), 0).wait() if comm.rank else comm.isend(bytes_(1), 1).wait()

    run(rank)
    assert not shown


# ---- cancel ------------------------------------------------------------------------------------


def test_a_receive_that_has_met_its_message_still_takes_it() -> None:
    def rank(comm: Comm) -> float:
        x = torch.zeros(1)
        if comm.rank == 0:
            comm.send(torch.ones(1), 1)
        else:
            work = comm.irecv(x, 0)
            pause(comm, "meet", 0.5)
            work.cancel()
            pause(comm, "arrive", 5.0)
        return x.item()

    assert run(rank).values == [0, 1]
