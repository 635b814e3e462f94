"""Wrong answers to the exercises of chapter 00."""

from __future__ import annotations

import pytest

from tests.exercises.answers import first_hint, judged, lost

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


def left_is_the_size(comm):
    return comm.rank, comm.size, comm.rank - 1 if comm.rank else comm.size, sides(comm)[0]


def only_the_right_goes_round(comm):
    return comm.rank, comm.size, comm.rank - 1, sides(comm)[0]


def ends_at_the_ends(comm):
    return comm.rank, comm.size, max(comm.rank - 1, 0), min(comm.rank + 1, comm.size - 1)


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (left_is_the_size, {"neighbours", "any size", "alone"}, "stand in a circle"),
    (only_the_right_goes_round, {"neighbours", "any size", "alone"}, "stand in a circle"),
    (ends_at_the_ends, {"neighbours", "any size"}, "stand in a circle"),
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
    assert hint in first_hint(report)


def test_a_call_that_fails_is_not_said_to_fail_in_a_line_of_the_graders():
    (came, *_) = [row.came for row in judged("hello-ranks", lambda: None).rows]
    assert came.endswith("takes 0 positional arguments but 1 was given")


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


def swaps(comm, value, other):
    inbox = [value] if comm.size == 1 else []
    if comm.size > 1:
        comm.sendrecv(value, other, inbox, other)
    return inbox[0]


def only_to_and_from_the_right(comm, value):
    return swaps(comm, value, sides(comm)[0])


def only_to_and_from_the_left(comm, value):
    return swaps(comm, value, sides(comm)[1])


def passes_on_what_came(comm, value):
    right, left = sides(comm)
    if comm.size > 1 and comm.rank % 2 == 0:
        comm.send(value, right)
        return comm.recv_object(left)
    if comm.size > 1:
        value = comm.recv_object(left)
        comm.send(value, right)
    return value


def forgets_the_remainder(comm, value):
    inbox = []
    comm.sendrecv(value, comm.rank + 1, inbox, comm.rank - 1)
    return inbox[0]


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (only_to_and_from_the_right, {"even circles", "odd circles"}, "does the rank that you send to"),
    (only_to_and_from_the_left, {"even circles", "odd circles"}, "does the rank that you send to"),
    (passes_on_what_came, CIRCLE - {"alone"}, "not what it has received"),
    (forgets_the_remainder, CIRCLE, "There is no such rank"),
    (as_given, CIRCLE, "use comm.sendrecv"),
    (receives_first, CIRCLE, "none has sent yet"),
    (forgets_the_lonely_rank, {"alone"}, "can't send to itself"),
    (pairs_only, {"even circles", "odd circles"}, "Rank 0 returned that of rank 1"),
    (returns_its_own, CIRCLE - {"alone"}, "returned its own value"),
    (wrong_way, {"even circles", "odd circles"}, "wrong way"),
    (returns_the_list, CIRCLE, "inbox[0]"),
], ids=lambda v: getattr(v, "__name__", ""))
def test_fix_deadlock(answer, rows, hint):
    report = judged("fix-deadlock", answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report)
    assert "In an odd circle" not in " ".join(report.hints)  # these fail in even ones, too


def test_a_deadlock_comes_with_the_table_and_the_learners_line():
    report = judged("fix-deadlock", as_given)
    assert "rank  doing  with" in report.details
    assert "in as_given" in report.details
    assert "deadlock" in report.rows[0].came


def test_who_exchanges_in_vain_is_not_said_to_send_first():
    report = judged("fix-deadlock", only_to_and_from_the_right)
    assert "exchange  1" in report.details
    assert "all ranks send first" not in " ".join(report.hints)


def test_every_way_out_of_the_deadlock_is_right():
    assert judged("fix-deadlock", takes_turns).points == 4
