"""A watched communicator does what an unwatched one does, in all that the contract offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtlab import Comm, Recv, Send, simulate
from dtlab.collectives import all_reduce
from dtlab.recording import frames_of
from dtlab.recording.watched import Notes, WatchedComm
from dtlab.topology import uniform

P = 4


def in_streams(comm: Comm, x: torch.Tensor) -> torch.Tensor:
    """Two all-reduces at once: one in a stream of the communicator, one in a stream of a group."""
    low, high = x.chunk(2)
    group = comm.subgroup(range(comm.size))
    works = [comm.begin(all_reduce, low), group.begin(all_reduce, high, algorithm="tree")]
    assert [work.wait() is half for work, half in zip(works, (low, high), strict=True)]
    return x


def by_arrival(comm: Comm, x: torch.Tensor) -> torch.Tensor:
    """Rank 0 adds what comes in the order in which it comes; one receive too many is cancelled."""
    if comm.rank:
        comm.labelled("up").send(x, 0)
        comm.recv(x, 0)
        return x
    inboxes = [torch.empty_like(x) for _ in range(comm.size)]
    works = comm.labelled("up").post(*(Recv(inbox) for inbox in inboxes))
    pending = list(zip(works, inboxes, strict=True))
    for _ in range(1, comm.size):
        done = comm.wait_any([work for work, _ in pending])
        assert done is not None
        assert done.wait() in range(1, comm.size)
        (inbox,) = [inbox for work, inbox in pending if work is done]
        comm.accumulate_(x, inbox)
        pending = [(work, inbox) for work, inbox in pending if work is not done]
    pending[0][0].cancel()
    comm.exchange(*(Send(x, rank) for rank in range(1, comm.size)))
    return x


def around_a_collective(comm: Comm, x: torch.Tensor) -> torch.Tensor:
    """A receive from anyone is pending during an all-reduce, on halves of the ranks and on all."""
    token = torch.zeros(1)
    pending = comm.irecv(token)
    half = comm.split(comm.rank % 2)
    assert half is not None
    all_reduce(half, x, algorithm="recursive_doubling")
    if comm.size > 1:
        other = comm.rank ^ 1
        partner = x.clone()
        comm.subgroup(sorted((comm.rank, other))).sendrecv(x, comm.rank % 2 ^ 1, partner,
                                                           comm.rank % 2 ^ 1)
        comm.accumulate_(x, partner)
    comm.send(torch.ones(1), (comm.rank + 1) % comm.size)
    pending.wait()
    assert token.item() == 1
    return x


ALL = [in_streams, by_arrival, around_a_collective]


@pytest.mark.parametrize("fn", ALL)
def test_its_frames_ends_complete(fn: Callable[..., torch.Tensor]) -> None:
    frames = frames_of(fn, P)
    assert frames[-1].done, frames[-1].holds
    assert not any(frame.wrong.any() for frame in frames)


@pytest.mark.parametrize("fn", ALL)
def test_messages_are_those_of_an_unwatched_run_and_each_is_noted_at_both_ends(
    fn: Callable[..., torch.Tensor]
) -> None:
    def watched(comm: Comm) -> tuple[list[Any], list[Any]]:
        notes = Notes()
        fn(WatchedComm(comm, notes, range(P)), torch.ones(8))
        return notes.sent, notes.received

    result, unwatched = (simulate(body, network=uniform(P, 1.0, float("inf")), overhead_s=0.0)
                         for body in (watched, lambda comm: fn(comm, torch.ones(8))))
    assert sorted(result.trace.transfers) == sorted(unwatched.trace.transfers)
    for rank, (sent, received) in enumerate(result.values):
        assert len(sent) == result.trace.messages(rank)
        came = sum(m.dst == rank for m in result.trace.transfers)
        assert len(received) == came + (fn is by_arrival and rank == 0)  # one was cancelled


def test_peers_are_noted_as_ranks_of_the_whole_run() -> None:
    def watched(comm: Comm) -> list[int | None]:
        notes = Notes()
        group = WatchedComm(comm, notes, range(P)).subgroup([3, 0, 1, 2])
        part = group.subgroup([2, 0] if comm.rank % 2 else [3, 1])  # of ranks 1, 3 and 2, 0
        part.sendrecv(torch.ones(1), 1 - part.rank, torch.ones(1), 1 - part.rank)
        return [side.peer for side in (*notes.sent, *notes.received)]

    peers = simulate(watched, network=uniform(P, 1.0, 1.0)).values
    assert peers == [[2, 2], [3, 3], [0, 0], [1, 1]]


def test_auto_chooses_as_unwatched() -> None:
    def machine(comm: Comm) -> bool:
        return WatchedComm(comm, Notes(), range(P)).machine == comm.machine

    assert simulate(machine, network=uniform(P, 3.0, 7.0)).values == [True] * P
