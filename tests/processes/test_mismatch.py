"""Messages that do not fit are refused by name, before a byte of them moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtlab import Comm, Deadlock, RankFailed, ShapeMismatch, run, simulate
from dtlab.collectives import all_reduce, broadcast, reduce
from dtlab.comm import Send
from dtlab.processes import match_check
from dtlab.processes.match_check import NO_HEADER, CheckedChannel, ContextCheck, decoded, encoded
from dtlab.processes.shared_status import CONTEXTS, SharedStatus
from dtlab.ranks.matching import Header
from dtlab.ranks.serialization import memory_file
from dtlab.topology import uniform

late = 0.2  # seconds by which one side comes second


def one_message(
    sent: Any, wanted: Any, src: int | None = 0, late_rank: int = 0
) -> Callable[[Comm], None]:
    def function(comm: Comm) -> None:
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


@pytest.mark.parametrize("how", [
    lambda fn: simulate(fn, network=uniform(3, 1e-5, 1e9)), lambda fn: run(fn, ranks=3, timeout=30),
], ids=["simulate", "run"])
def test_roots_that_differ_are_named_though_no_message_ever_meets(how: Callable[..., Any]) -> None:
    def each_its_own_root(comm: Comm) -> None:
        broadcast(comm, torch.ones(2), root=comm.rank, algorithm="flat")

    with pytest.raises(Deadlock, match=r"some are in broadcast\(.*root=0\), others in .*root=1\)"):
        how(each_its_own_root)


def long_names_that_differ_at_the_end(comm: Comm) -> None:
    comm = comm.labelled("a name that is long, " * 10 + str(comm.rank))
    if comm.rank:
        comm.send(torch.zeros(1), 0)
    else:
        comm.recv(torch.zeros(1), 1)


@pytest.mark.parametrize(("call", "words"), [
    (lambda comm: reduce(comm, torch.zeros(4), root=1) if comm.rank else
     broadcast(comm, torch.zeros(4)), r"(?s)broadcast.*reduce|reduce.*broadcast"),
    (lambda comm: all_reduce(comm, torch.zeros(4 + comm.rank)), r"(?s)\[4\].*\[5\]|\[5\].*\[4\]"),
    (lambda comm: comm.begin(all_reduce if comm.rank else broadcast, torch.zeros(4)).wait(),
     r"(?s)broadcast.*all_reduce|all_reduce.*broadcast"),
    (long_names_that_differ_at_the_end, "rank 1 is in a name that is long"),
])
def test_calls_that_differ_are_named(call: Callable[[Comm], object], words: str) -> None:
    with pytest.raises(ShapeMismatch, match=words):
        run(call, ranks=2, timeout=20)


def test_a_header_survives_its_text_and_a_long_one_is_left_out() -> None:
    header = Header("tensor", "float32", (2, 3), 24, "all_reduce(float32 [2, 3])")
    assert decoded(encoded(header).text) == header
    assert decoded(encoded(header).text + b"rubbish of a longer one") == header
    assert encoded(header._replace(shape=tuple(range(100)))) == NO_HEADER


def sides(context: int = 7) -> tuple[SharedStatus, CheckedChannel, CheckedChannel]:
    """The shared status of two ranks, and both sides of the channel from rank 0 to rank 1."""
    status = SharedStatus(memory_file("test"), 2)
    checks = [ContextCheck(status, rank, context, 0) for rank in (0, 1)]
    return status, *(CheckedChannel(checks[rank], 0, 1, receiving=rank == 1) for rank in (0, 1))


def of_length(n: int) -> match_check.EncodedHeader:
    return encoded(Header("tensor", "float32", (n,), 4 * n, ""))


def test_each_context_is_counted_by_itself_and_forgotten_when_all_begins_anew() -> None:
    status, sends, _ = sides()
    sends.announce(of_length(3))
    assert status.posted(0, 1, False, 7) == 1
    assert status.posted(0, 1, True, 7) == 0
    assert status.posted(0, 1, False, 8) == 0  # a context that rank 0 has not formed
    status.clear()
    assert status.posted(0, 1, False, 7) == 0


def test_of_more_contexts_than_there_is_room_for_nothing_is_claimed() -> None:
    status = SharedStatus(memory_file("test"), 2)
    for index in range(CONTEXTS + 1):
        check = ContextCheck(status, 0, 100 + index, index)
    CheckedChannel(check, 0, 1, receiving=False).announce(of_length(3))
    assert status.posted(0, 1, False, 100) == 0
    assert status.posted(0, 1, False, 100 + CONTEXTS) is None


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


def test_messages_that_are_not_compared_leave_no_header() -> None:
    """As receives do while others of the same rank take a message from any source."""
    _, sends, receives = sides()
    assert receives.announce(NO_HEADER) == 0
    assert sends.announce(of_length(3)) == 0  # and does not raise


def test_a_refused_message_leaves_its_number_to_the_next() -> None:
    status, sends, receives = sides()
    receives.announce(of_length(3))
    with pytest.raises(ShapeMismatch):
        sends.announce(of_length(4))
    assert status.posted(0, 1, False, 7) == 0
    assert sends.announce(of_length(3)) == 0


@pytest.mark.parametrize("fits", [True, False])
def test_two_that_announce_at_the_same_time_both_look_again(
    fits: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither has seen the other at first; once both have written, each looks once more."""
    _, sends, receives = sides()
    fence = match_check._memory_fence

    def others_turn() -> None:
        monkeypatch.setattr(match_check, "_memory_fence", fence)
        monkeypatch.setattr(receives, "_they_have_posted", lambda number: False)
        receives.announce(of_length(3 if fits else 4))

    monkeypatch.setattr(match_check, "_memory_fence", others_turn)
    if fits:
        assert sends.announce(of_length(3)) == 0
    else:
        with pytest.raises(ShapeMismatch):
            sends.announce(of_length(3))
