"""Wrong answers to the exercises of chapter 00."""

from __future__ import annotations

import pytest

from tests.exercises.answers import judged, lost

HELLO = {"who am I", "neighbours", "any size", "alone"}
CIRCLE = {"a pair", "even circles", "odd circles", "alone"}


def sides(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


# ---- hello-ranks -------------------------------------------------------------------------------


def no_circle(comm):
    return comm.rank, comm.size, comm.rank - 1, comm.rank + 1


def always_four(comm):
    return comm.rank, 4, (comm.rank - 1) % 4, (comm.rank + 1) % 4


def left_is_right(comm):
    return comm.rank, comm.size, *sides(comm)


def three_numbers(comm):
    return comm.rank, comm.size, (comm.rank + 1) % comm.size


def prints_only(comm):
    print(comm.rank, comm.size)


def size_first(comm):
    return comm.size, comm.rank, (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size


def counts_from_one(comm):
    return comm.rank + 1, comm.size, (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (no_circle, {"neighbours", "any size", "alone"}, "stand in a circle"),
    (always_four, {"any size", "alone"}, "comm.size"),
    (left_is_right, {"neighbours", "any size"}, "wrong way round"),
    (three_numbers, HELLO, "four numbers"),
    (prints_only, HELLO, "returns nothing"),
    (size_first, {"who am I", "any size", "alone"}, "the wrong way round: return rank, size"),
    (counts_from_one, {"who am I", "any size", "alone"}, "comm.rank is this rank's number"),
], ids=lambda v: getattr(v, "__name__", ""))
def test_hello_ranks(answer, rows, hint):
    report = judged("hello-ranks", answer)
    assert lost(report) == rows, str(report)
    assert hint in " ".join(report.hints)


# ---- fix-deadlock ------------------------------------------------------------------------------


def as_given(comm, value):
    right, left = sides(comm)
    comm.send(value, right)
    return comm.recv_object(left)


def forgets_the_lonely_rank(comm, value):
    right, left = sides(comm)
    inbox = []
    comm.sendrecv(value, right, inbox, left)
    return inbox[0]


def takes_turns(comm, value):  # right: somebody receives first
    right, left = sides(comm)
    if comm.size == 1:
        return value
    if comm.rank % 2:
        came = comm.recv_object(left)
        comm.send(value, right)
        return came
    comm.send(value, right)
    return comm.recv_object(left)


def pairs_only(comm, value):
    if comm.size == 1:
        return value
    other = comm.rank ^ 1
    inbox = []
    comm.sendrecv(value, other, inbox, other)
    return inbox[0]


def returns_its_own(comm, value):
    forgets_the_lonely_rank(comm, value) if comm.size > 1 else None
    return value


def wrong_way(comm, value):
    right, left = sides(comm)
    if comm.size == 1:
        return value
    inbox = []
    comm.sendrecv(value, left, inbox, right)
    return inbox[0]


def returns_the_list(comm, value):
    right, left = sides(comm)
    inbox = [] if comm.size > 1 else [value]
    if comm.size > 1:
        comm.sendrecv(value, right, inbox, left)
    return inbox


def receives_first(comm, value):
    right, left = sides(comm)
    came = comm.recv_object(left)
    comm.send(value, right)
    return came


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (as_given, CIRCLE, "use comm.sendrecv"),
    (receives_first, CIRCLE, "none has sent yet"),
    (forgets_the_lonely_rank, {"alone"}, "can't send to itself"),
    (pairs_only, {"even circles", "odd circles"}, "wrong way"),
    (returns_its_own, CIRCLE - {"alone"}, "returned its own value"),
    (wrong_way, {"even circles", "odd circles"}, "wrong way"),
    (returns_the_list, CIRCLE, "inbox[0]"),
], ids=lambda v: getattr(v, "__name__", ""))
def test_fix_deadlock(answer, rows, hint):
    report = judged("fix-deadlock", answer)
    assert lost(report) == rows, str(report)
    assert hint in " ".join(report.hints)


def test_a_deadlock_comes_with_the_table_and_the_learners_line():
    report = judged("fix-deadlock", as_given)
    assert "rank  doing  with" in report.details
    assert "in as_given" in report.details
    assert "deadlock" in report.rows[0].came


def test_every_way_out_of_the_deadlock_is_right():
    assert judged("fix-deadlock", takes_turns).points == 4
