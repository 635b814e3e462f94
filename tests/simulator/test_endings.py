"""How a simulation ends before its time: tables, hints, interrupts, and what is left behind."""

from __future__ import annotations

import _thread
import gc
import itertools
import os
import signal
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import greenlet
import matplotlib.pyplot as plt
import pytest
import torch

import dtlab
from dtlab import Comm, Recv, Send, simulate, topology
from dtlab.collectives import all_reduce, barrier
from dtlab.simulator.network import Network
from tests.simulator.shared import Shared


def net(p: int) -> topology.Topology:
    return topology.uniform(p, 1e-6, 1e9)


def table(fn: Any, p: int, **options: Any) -> list[tuple[Any, ...]]:
    with pytest.raises(dtlab.Deadlock) as caught:
        simulate(fn, network=net(p), echo=False, **options)
    return [(w.doing, w.peer, w.nbytes) for w in caught.value.waiting]


@pytest.mark.parametrize("strands", ["greenlet", "thread"])
def test_the_table_says_what_everyone_waits_for(strands: str) -> None:
    def fn(comm: Comm) -> None:
        x, y = torch.zeros(3), torch.zeros(5, dtype=torch.float64)
        if comm.rank == 0:
            comm.sendrecv(x, 1, y, 2)
        elif comm.rank == 1:
            assert comm.recv_object(4) == "hello"
            comm.exchange(Send(x, 3), Recv(x.clone(), 2))
        elif comm.rank == 2:
            comm.split(0)
        elif comm.rank == 3:
            comm.irecv(y, 0).wait()
        elif comm.rank == 4:
            comm.send("hello", 1)
            comm.send([1, 2, 3], 0)
        elif comm.rank == 5:
            comm.exchange(Send(x, 0), Recv(x.clone()))

    rows = table(fn, 7, strands=strands)
    objects = rows[4][2]
    assert objects > 0
    assert rows == [
        ("exchange", "1 and 2", 12), ("exchange", "3 and 2", 12),
        ("split", "0 and 1 and 3 and 4 and 5 and 6", None), ("recv", "0", 40),
        ("send", "0", objects), ("exchange", "0 and anyone", 12), ("returned", "", None),
    ]


def test_only_what_is_still_missing_stands_in_the_table() -> None:
    def fn(comm: Comm) -> None:
        if comm.rank == 0:
            comm.exchange(Send(torch.ones(1), 1), Recv(torch.ones(2), 1))
        else:
            comm.recv(torch.ones(1), 0)

    assert table(fn, 2) == [("recv", "1", 8), ("returned", "", None)]


def test_ranks_of_a_sub_communicator_go_by_their_numbers_in_the_run() -> None:
    def fn(comm: Comm) -> None:
        half = comm.split(comm.rank % 2)
        assert half is not None
        half.send(torch.ones(1), 1 - half.rank)

    assert table(fn, 4) == [("send", peer, 4) for peer in "2301"]


@pytest.mark.parametrize("strands", ["greenlet", "thread"])
def test_the_line_is_the_learners_not_ours(strands: str) -> None:
    def fn(comm: Comm) -> None:
        barrier(comm)
        if comm.rank:
            all_reduce(comm, torch.ones(4))  # this line

    with pytest.raises(dtlab.Deadlock) as caught:
        simulate(fn, network=net(3), strands=strands)
    line = fn.__code__.co_firstlineno + 3
    assert [w.line for w in caught.value.waiting[1:]] == [f"test_endings.py:{line} in fn"] * 2
    assert [w.doing for w in caught.value.waiting[1:]] == [
        "recv in all_reduce", "send in all_reduce"]


def test_a_traceback_begins_and_ends_at_the_learners_lines() -> None:
    def fn(comm: Comm) -> None:
        comm.send(torch.ones(1), 7)

    with pytest.raises(dtlab.RankFailed) as caught:
        simulate(fn, network=net(2))
    text = caught.value.traceback_text
    assert text.count("File ") == 1
    assert "comm.send(torch.ones(1), 7)" in text
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.__traceback__ is None  # the text has it


@pytest.mark.parametrize("strands", ["greenlet", "thread"])
def test_ctrl_c_stops_a_simulation_and_the_next_one_works(strands: str) -> None:
    cleaned = Shared()

    def endless(comm: Comm) -> None:
        try:
            while True:
                barrier(comm)
        finally:
            cleaned.append(comm.rank)

    threading.Timer(0.3, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        simulate(endless, network=net(3), strands=strands)
    assert sorted(cleaned) == [0, 1, 2]
    assert simulate(lambda comm: comm.rank, network=net(2)).values == [0, 1]
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]


@pytest.mark.parametrize("strands", ["greenlet", "thread"])
def test_an_interrupt_is_not_lost_while_the_clock_moves(
        strands: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settle, calls = Network.settle, itertools.count()

    def interrupted(network: Network, now_s: float) -> Any:
        if next(calls) == 10:
            raise KeyboardInterrupt
        return settle(network, now_s)

    monkeypatch.setattr(Network, "settle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        simulate(lambda comm: [barrier(comm) for _ in range(100)], network=net(3), strands=strands)
    assert next(calls) == 11  # and nothing has moved since


@pytest.mark.parametrize("strands", ["greenlet", "thread"])
def test_clean_up_may_try_to_communicate(strands: str) -> None:
    def fn(comm: Comm) -> None:
        if comm.rank == 2:
            raise ValueError("enough")
        try:
            comm.recv(torch.ones(1), 2)
        finally:
            try:
                barrier(comm)
            finally:
                with comm.compute("tidy up", seconds=1.0):
                    print("clean")

    with pytest.raises(dtlab.RankFailed, match="rank 2 raised ValueError: enough"):
        simulate(fn, network=net(3), strands=strands)


def test_an_exit_code_is_kept() -> None:
    for code, kept in ((None, 0), (3, 3), ("because", 1)):
        with pytest.raises(dtlab.RankDied, match=f"exit\\({code!r}\\)") as caught:
            simulate(lambda comm, code=code: exit(code) if comm.rank == 1 else None,
                     network=net(2))
        assert (caught.value.rank, caught.value.exitcode) == (1, kept)


@pytest.mark.parametrize("strands", ["greenlet", "thread"])
@pytest.mark.parametrize("ending", ["returns", "raises", "deadlocks"])
def test_nothing_of_a_simulation_stays_in_memory(strands: str, ending: str) -> None:
    alive = Shared()

    def fn(comm: Comm) -> None:
        x = torch.ones(10)
        alive.append(weakref.ref(x))
        all_reduce(comm, x)
        if ending == "raises":
            raise ValueError
        if ending == "deadlocks":
            comm.recv(x, 1 - comm.rank)

    with suppress(dtlab.DtlabError):
        simulate(fn, network=net(2), strands=strands)
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_the_collector_of_garbage_is_left_as_it_was() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(701, 11, 12)
        simulate(lambda comm: barrier(comm), network=net(3))
        assert (gc.get_threshold(), gc.isenabled()) == ((701, 11, 12), True)
    finally:
        gc.set_threshold(*before)


def test_a_time_limit_holds_while_ranks_only_compute_in_virtual_time() -> None:
    def fn(comm: Comm) -> None:
        while True:
            with comm.compute("step", seconds=1.0):
                pass

    began = time.monotonic()
    with pytest.raises(dtlab.RunTimeout, match="compute step"):
        simulate(fn, network=net(2), timeout=0.1)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("options", [
    {"gamma": float("inf")}, {"gamma": "fast"}, {"gamma": True}, {"eager_bytes": -1},
    {"eager_bytes": "all"}, {"timeout": -1}, {"timeout": float("nan")}, {"timeout": "soon"},
    {"gamma": -1.0}, {"gamma": float("nan")}, {"eager_bytes": float("nan")}, {"timeout": 0},
    {"strands": "fibers"}, {"network": 4}, {"network": None},
])
def test_settings_that_make_no_sense_are_quoted(options: dict[str, Any]) -> None:
    (value,) = options.values()
    with pytest.raises(dtlab.ConfigError, match=repr(value)):
        simulate(lambda comm: None, **{"network": net(2)} | options)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_work_takes_a_finite_time(seconds: float) -> None:
    with pytest.raises(dtlab.ConfigError, match=r"rank 0.*'forward'"):
        simulate(lambda comm: comm.compute("forward", seconds).__enter__(), network=net(1))


@pytest.mark.parametrize("hung", [lambda: None, lambda: time.sleep(0.01)], ids=["spins", "sleeps"])
def test_an_interrupt_ends_ranks_on_threads_too(hung: Any) -> None:
    def forever(comm: Comm) -> None:
        while True:
            hung()

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background ignores
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        simulate(forever, network=net(2), strands="thread")
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]


def test_a_rank_has_no_keyboard_no_screen_and_needs_no_output(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "Ada")
    with pytest.raises(dtlab.RankFailed, match="a rank has no keyboard"):
        simulate(lambda comm: input("name? "), network=net(2))
    assert input() == "Ada"
    with pytest.raises(dtlab.RankFailed, match="use comm and dtlab"):
        simulate(lambda comm: torch.distributed.init_process_group("gloo"), network=net(2))
    with pytest.raises(dtlab.ConfigError, match="no screen: return"):
        simulate(lambda comm: plt.show(), network=net(2))
    monkeypatch.setattr("sys.stdout", None)
    assert simulate(lambda comm: print("x"), network=net(2)).values == [None, None]


def test_the_virtual_clock_does_not_run_out() -> None:
    def sleeps(comm: Comm) -> None:
        for _ in range(3):
            with comm.compute("long", seconds=1e308):
                pass

    with pytest.raises(dtlab.ConfigError, match="hold that many"):
        simulate(sleeps, network=net(1))


def test_what_cannot_arrive_is_the_receivers_error_and_too_deep_calls_are_their_ranks() -> None:
    class Breaks:
        def __reduce__(self) -> Any:
            return eval, ("1/0",)

    def deeper(comm: Comm) -> None:
        barrier(comm)
        deeper(comm)

    def exchange(comm: Comm) -> None:
        comm.send(Breaks(), 1) if comm.rank == 0 else comm.recv_object(0)

    with pytest.raises(dtlab.RankFailed, match="rank 1 raised ZeroDivisionError"):
        simulate(exchange, network=net(2))
    with pytest.raises(dtlab.RankFailed, match=r"rank \d raised RecursionError"):
        simulate(deeper, network=net(3))


def test_a_thread_or_greenlet_that_a_rank_started_is_told_that_it_cannot_communicate() -> None:
    def fn(comm: Comm) -> Any:
        return greenlet.greenlet(lambda: barrier(comm)).switch()

    with pytest.raises(dtlab.RankFailed, match="has started can't communicate"):
        simulate(fn, network=net(2))
    assert simulate(fn, network=net(2), strands="thread").values == [None, None]
