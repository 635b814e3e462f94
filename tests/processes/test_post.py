"""Letters between ranks of one host: they come whole, in order, and once."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtlab import Comm, Deadlock, RankFailed, RunTimeout, Session, collectives, run
from dtlab.processes import post
from dtlab.processes.board import EPOCH
from dtlab.processes.post import Post

pytestmark = pytest.mark.skipif(not post.POSSIBLE, reason="no sockets of this kind here")
PIECE = post._PIECE_BYTES


def posts(ranks: int) -> list[Post]:
    """The posts of a run's ranks, all in this process."""
    boxes = post.boxes(ranks)
    return [Post(rank, boxes[rank][0].dup(), [write.dup() for _, write in boxes])
            for rank in range(ranks)]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 999]),
                          st.integers(0, 1), st.sampled_from([4, 9])), max_size=25))
def test_letters_of_any_length_come_whole_and_in_order(sent: list[tuple[int, int, int]]) -> None:
    a, b, c = posts(3)
    letters = [(secrets.token_bytes(size), src, context) for size, src, context in sent]
    for letter, src, context in letters:
        (a, b)[src].send(letter, 2, context)
    for context in (9, 4):
        for src in (1, 0):
            for letter, who, where in letters:
                if (who, where) == (src, context):
                    assert c.receive([src], context) == (src, letter)


def test_a_sender_does_not_wait_for_its_reader() -> None:
    a, b = posts(2)
    for number in range(3000):  # the system keeps some 200 of them
        a.send(b"%d" % number, 1, 0)
    assert a.late() == [1]
    assert [b.receive([0], 0)[1] for _ in range(3000)] == [b"%d" % number for number in range(3000)]
    until_s = time.monotonic() + 10
    while a.late() and time.monotonic() < until_s:
        time.sleep(0.001)
    a.send(b"last", 1, 0)
    assert a.late() == []
    assert b.receive([0], 0) == (0, b"last")


def test_threads_of_one_rank_wait_side_by_side() -> None:
    a, b = posts(2)
    found: dict[int, bytes] = {}

    def wait(context: int) -> None:
        found[context] = b.receive([0], context)[1]

    threads = [threading.Thread(target=wait, args=(at,), daemon=True) for at in range(5)]
    for thread in threads:
        thread.start()
    for context in (3, 0, 4, 2, 1):  # whoever reads gets the others' letters, too
        a.send(b"to %d" % context, 1, context)
    for thread in threads:
        thread.join(20)
    assert found == {context: b"to %d" % context for context in range(5)}


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_letters_from_all_to_all(ranks: int) -> None:
    def body(comm: Comm) -> list[Any]:
        letters: Any = comm.letters  # type: ignore[attr-defined]
        for turn in range(40):
            for dst in range(comm.size):
                if dst != comm.rank:
                    letters.send((comm.rank, turn, "x" * turn * 3000), dst)
        collectives.barrier(comm)  # nobody has read yet, and none waits for it
        found = [letters.receive() for _ in range(40 * (comm.size - 1))]
        letters.flush()
        assert all(src == body[0] and len(body[2]) == 3000 * body[1] for src, body in found)
        return [[body[1] for src, body in found if src == who] for who in range(comm.size)]

    for rank, found in enumerate(run(body, ranks=ranks, timeout=60).values):
        assert found == [[] if src == rank else list(range(40)) for src in range(ranks)]


def test_who_waits_for_a_letter_that_nobody_sends_is_named() -> None:
    def body(comm: Comm, src: int | None) -> None:
        if comm.rank == 1:
            comm.letters.receive(src)  # type: ignore[attr-defined]

    with pytest.raises(Deadlock, match="1") as caught:
        run(body, 0, ranks=3, timeout=30)
    assert [(row.rank, row.peer) for row in caught.value.waiting if row.peer] == [(1, "0")]
    with pytest.raises(Deadlock) as caught:
        run(body, None, ranks=3, timeout=30)
    assert [(row.rank, row.peer) for row in caught.value.waiting if row.peer] == [(1, "anyone")]


def test_who_waits_until_letters_have_left_is_named() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 0:
            for number in range(3000):
                comm.letters.send(number, 1)  # type: ignore[attr-defined]
            comm.letters.flush()  # type: ignore[attr-defined]
        else:
            time.sleep(60)

    with pytest.raises(RunTimeout) as caught:
        run(body, ranks=2, timeout=5)
    first = caught.value.waiting[0]
    assert (first.rank, first.doing, first.peer) == (0, "send", "1")


def test_a_letter_on_its_way_is_no_deadlock() -> None:
    def body(comm: Comm) -> Any:
        if comm.rank == 0:
            comm.letters.send("late", 1)  # type: ignore[attr-defined]
            return comm.recv_object(1)
        box: Any = comm.end.post  # type: ignore[attr-defined]
        read = box._next

        def slowly() -> Any:
            time.sleep(1.0)
            return read()

        box._next = slowly
        comm.send(comm.letters.receive(0)[1], 0)  # type: ignore[attr-defined]
        return None

    assert run(body, ranks=2).values[0] == "late"


@pytest.mark.parametrize("src", [0, None])
def test_who_waits_for_a_rank_that_dies_hears_of_it(src: int | None) -> None:
    def body(comm: Comm, src: int | None) -> str:
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            comm.letters.receive(src)  # type: ignore[attr-defined]
        except RuntimeError as error:
            return str(error)
        return "no"

    result = run(body, src, ranks=2, may_die=[0], timeout=30)
    assert result.values == [None, "Connection closed by peer: rank 0 of the run has ended"]


def test_to_a_dead_rank_nothing_is_sent() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        comm.letters.send("hello", 0)  # type: ignore[attr-defined]

    with pytest.raises(RankFailed, match="rank 0 of the run has ended"):
        run(body, ranks=2, may_die=[0], timeout=30)


def test_letters_stand_in_the_trace() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 0:
            comm.label = "greeting"
            comm.letters.send("hello", 1)  # type: ignore[attr-defined]
        else:
            comm.letters.receive()  # type: ignore[attr-defined]

    (message,) = run(body, ranks=2).trace.transfers
    nbytes = len(pickle.dumps("hello", -1))
    assert (message.src, message.dst, message.nbytes) == (0, 1, nbytes)
    assert message.label == "greeting"


def test_what_a_failed_run_has_left_is_not_read_by_the_next() -> None:
    def fails(comm: Comm) -> None:
        if comm.rank == 0:
            comm.letters.send("old", 1)  # type: ignore[attr-defined]
            comm.letters.send("x" * 100_000, 1)  # type: ignore[attr-defined]
        collectives.barrier(comm)
        raise ValueError

    def after(comm: Comm) -> Any:
        if comm.rank == 0:
            comm.letters.send("new", 1)  # type: ignore[attr-defined]
            return None
        found = comm.letters.receive()  # type: ignore[attr-defined]
        assert set(comm.end.post._come) == {comm.context}  # type: ignore[attr-defined]
        return comm.context, found  # type: ignore[attr-defined]

    with Session(ranks=2) as session:
        with pytest.raises(RankFailed):
            session.run(fails)
        assert session.run(after).values[1] == (EPOCH, (0, "new"))
