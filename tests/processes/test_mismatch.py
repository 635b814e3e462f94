"""Messages that do not fit are refused by name, before a byte of them moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtlab import Comm, Deadlock, RankFailed, ShapeMismatch, run, simulate
from dtlab.collectives import all_reduce, broadcast, reduce
from dtlab.comm import Send
from dtlab.matching import Header
from dtlab.processes import ledger
from dtlab.processes.board import EPOCH, Board
from dtlab.processes.ledger import NO_HEADER, Pair, Pairs, announced, decode, encode
from dtlab.processes.transfer import memory_file
from dtlab.topology import uniform

late = 0.2  # seconds by which one side comes second


def one_message(
    sent: Any, wanted: Any, src: int | None = 0, late_rank: int = 0
) -> Callable[[Comm], None]:
    def function(comm: Comm) -> None:
        import time

        if comm.rank == late_rank:
            time.sleep(late)
        if comm.rank == 0:
            comm.send(sent, 1)
        elif comm.rank == 1:
            comm.recv(wanted, src)

    return function


@pytest.mark.parametrize("late_rank", [0, 1])
@pytest.mark.parametrize("src", [0, None])
@pytest.mark.parametrize(("sent", "wanted", "words"), [
    (torch.zeros(3), torch.zeros(4), ["float32 (3,)", "float32 (4,)"]),
    (torch.zeros(5_000_000), torch.zeros(4), ["float32 (5000000,)", "float32 (4,)"]),
    (torch.zeros(2, 3), torch.zeros(3, 2), ["(2, 3)", "(3, 2)"]),
    (torch.zeros(4), torch.zeros(4, dtype=torch.int32), ["float32", "int32"]),
    ({"a": 1}, torch.zeros(64), ["an object", "float32"]),
    (torch.zeros(64), [], ["float32", "an object"]),
])
def test_the_second_to_come_refuses(
    sent: Any, wanted: Any, words: list[str], src: int | None, late_rank: int
) -> None:
    with pytest.raises(ShapeMismatch) as caught:
        run(one_message(sent, wanted, src, late_rank), ranks=2, timeout=20)
    assert isinstance(caught.value, RankFailed)
    assert caught.value.rank == late_rank
    text = str(caught.value)
    assert "rank 0 sent" in text
    assert "rank 1 waits" in text
    assert all(word in text for word in words)
    assert "test_mismatch.py" in text  # the learner's line


def test_whoever_catches_it_may_try_again() -> None:
    def stubborn(comm: Comm) -> float | None:
        import time

        if comm.rank == 0:
            time.sleep(late)
            with pytest.raises(ShapeMismatch):
                comm.send(torch.ones(3), 1)
            comm.send(torch.ones(4), 1)
            comm.send(torch.ones(2), 1)
            return None
        x, y = torch.zeros(4), torch.zeros(2)
        comm.recv(x, 0)
        comm.recv(y, 0)
        return x.sum().item() + y.sum().item()

    assert run(stubborn, ranks=2, timeout=20).values[1] == 6.0


def test_collectives_that_differ_are_named() -> None:
    def mixed(comm: Comm) -> None:
        x = torch.zeros(4)
        broadcast(comm, x) if comm.rank == 0 else reduce(comm, x, root=1)

    with pytest.raises(ShapeMismatch, match=r"(?s)broadcast.*reduce|reduce.*broadcast"):
        run(mixed, ranks=2, timeout=20)


@pytest.mark.parametrize("how", [
    lambda fn: simulate(fn, network=uniform(3, 1e-5, 1e9)), lambda fn: run(fn, ranks=3, timeout=30),
], ids=["simulate", "run"])
def test_roots_that_differ_are_named_though_no_message_ever_meets(how: Callable[..., Any]) -> None:
    def each_its_own_root(comm: Comm) -> None:
        broadcast(comm, torch.ones(2), root=comm.rank, algorithm="flat")

    with pytest.raises(Deadlock, match=r"some are in broadcast\(.*root=0\), others in .*root=1\)"):
        how(each_its_own_root)


def test_calls_differ_also_where_only_the_end_of_a_long_name_tells() -> None:
    def work(comm: Comm) -> None:
        with comm.labelled("a name that is long, " * 10 + str(comm.rank)):
            if comm.rank:
                comm.send(torch.zeros(1), 0)
            else:
                comm.recv(torch.zeros(1), 1)

    with pytest.raises(ShapeMismatch, match="rank 1 is in a name that is long"):
        run(work, ranks=2)


def test_sizes_that_differ_are_named() -> None:
    def uneven(comm: Comm) -> None:
        all_reduce(comm, torch.zeros(4 + comm.rank // 2))

    with pytest.raises(ShapeMismatch, match=r"(?s)\[4\].*\[5\]|\[5\].*\[4\]"):
        run(uneven, ranks=3, timeout=20)


def test_more_messages_than_the_ledger_keeps_still_arrive() -> None:
    def burst(comm: Comm) -> float | None:
        sizes = [1 + n % 7 for n in range(100)]
        if comm.rank == 0:
            for work in [comm.isend(torch.ones(size), 1) for size in sizes]:
                work.wait()
            return None
        into = [torch.zeros(size) for size in sizes]
        for work in [comm.irecv(x, 0) for x in into]:
            work.wait()
        return sum(x.sum().item() for x in into)

    assert run(burst, ranks=2).values[1] == sum(1 + n % 7 for n in range(100))


def test_a_header_survives_its_text_and_a_long_one_is_left_out() -> None:
    header = Header("tensor", "float32", (2, 3), 24, "all_reduce(float32 [2, 3])")
    assert decode(encode(header)) == header
    assert decode(encode(header) + b"rubbish of a longer one") == header
    assert encode(header._replace(shape=tuple(range(100)))) == b""


def test_the_board_forgets_what_an_older_epoch_left() -> None:
    board = Board(memory_file("test"), 2)
    board.set_count(0, 1, False, 0, 5)
    assert board.count(0, 1, False, 0) == 5
    assert board.count(0, 1, False, 16) is None  # may have been overwritten: nobody knows
    assert board.count(0, 1, False, EPOCH) == 0
    assert board.count(1, 0, False, 0) == 0


def test_of_many_messages_one_may_meet_a_receive_from_anyone() -> None:
    def function(comm: Comm) -> None:
        if comm.rank == 0:
            work = comm.irecv(torch.zeros(3))  # from anyone
            comm.send("posted", 1)
            work.wait()
        elif comm.rank == 1:
            comm.recv_object(0)
            comm.exchange(Send(torch.ones(4), 0), Send(torch.ones(2), 2))
        else:
            comm.recv(torch.zeros(2), 1)

    with pytest.raises(ShapeMismatch, match=r"\(4,\).*\(3,\)|\(3,\).*\(4,\)"):
        run(function, ranks=3, timeout=20)


def test_of_many_messages_those_that_are_not_compared_leave_no_header() -> None:
    """As receives do while others of the same rank take a message from anyone."""
    board = Board(memory_file("test"), 2)
    mine, theirs = (Pair(board, 0, 1, receiving, 1) for receiving in (True, False))
    assert Pairs([mine]).announce([0], [NO_HEADER]) == [0]
    assert board.header(0, 1, True, 1, 0) is None
    assert theirs.announce(0, announced(Header("tensor", "float32", (3,), 12, "")))


@pytest.mark.parametrize("fits", [True, False])
def test_two_that_announce_at_the_same_time_both_look_again(
    fits: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither has seen the other at first; once both have written, each looks once more."""
    board = Board(memory_file("test"), 2)
    mine, theirs = (Pair(board, 0, 1, receiving, 1) for receiving in (False, True))
    sent, wanted = (announced(Header("tensor", "float32", (n,), 4 * n, ""))
                    for n in (3, 3 if fits else 4))
    fence = ledger._fence

    def others_turn() -> None:
        monkeypatch.setattr(ledger, "_fence", fence)
        theirs._write(0, theirs._base + 1, wanted)
        board.set_count(0, 1, True, 1, 1)

    monkeypatch.setattr(ledger, "_fence", others_turn)
    if fits:
        assert Pairs([mine]).announce([0], [sent]) == [0]
    else:
        with pytest.raises(ShapeMismatch):
            Pairs([mine]).announce([0], [sent])
