"""Many messages, said in one call: chunks that are handed on, as round a ring; sends or receives in
turn; rows to and from many at once. A communicator may bring its own of each, under the same name.

Whoever knows what comes next can do better: processes over Gloo cut long chunks in pieces, so that
one is added while the next comes in (`dtlab.processes.relay`), have room ready for all that is to
come in turn, and look at rows once, not one by one; the simulator, if there are no data, need not
wake a rank for each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch

from dtlab.comm import Comm, Recv, Send
from dtlab.reduction import Op


def relay(
    comm: Comm, chunks: Sequence[torch.Tensor], dst: int, src: int, op: Op = "sum", adding: int = 0
) -> None:
    """In place. The first of `chunks`, vectors, goes to `dst`; then each of the others, in turn,
    comes from `src` and goes on to `dst`, but for the last. The first `adding` that come are added
    (`op`) to what lies in their place, the others replace it.

    The neighbours must be in a relay, too, and what one sends must fit what the next has room for,
    else `ShapeMismatch`. A chunk may have two turns if what comes at the second
    was made of what left at the first, as round a ring. Memory: the largest chunk that is added
    to; over Gloo at most two pieces of 1 MiB. Cost: of each step α + c(β + γ), c bytes in a chunk.
    """
    better = getattr(comm, "relay", None)
    if better is None:
        one_by_one(comm, chunks, dst, src, op, adding)
    else:
        better(chunks, dst, src, op, adding)


def one_by_one(
    comm: Comm, chunks: Sequence[torch.Tensor], dst: int, src: int, op: Op = "sum", adding: int = 0
) -> None:
    """`relay` on any communicator."""
    rooms = inboxes(comm, chunks, adding)
    for step, (leaving, staying) in enumerate(pairwise(chunks)):
        if step < adding:
            summand = rooms[staying.numel()]
            comm.sendrecv(leaving, dst, summand, src)
            comm.accumulate_(staying, summand, op)
        else:
            comm.sendrecv(leaving, dst, staying, src)


def inboxes(
    comm: Comm, chunks: Sequence[torch.Tensor], adding: int
) -> dict[int, torch.Tensor]:
    """For each size of a summand, room for it; all in the same memory."""
    if not adding:
        return {}
    largest = max(chunks[1 : adding + 1], key=torch.Tensor.numel)
    inbox = torch.empty_like(largest)
    return {n: inbox[:n] for n in {chunk.numel() for chunk in chunks[1 : adding + 1]}}


def in_turn(comm: Comm, *ops: Send | Recv) -> None:
    """All of `ops`, one after the other: sends only, or receives only.

    Cost: the sum of theirs; over Gloo, where a rank has one port for all, they are posted together.
    """
    better = getattr(comm, "in_turn", None)
    if better is None:
        for op in ops:
            comm.exchange(op)
    else:
        better(*ops)


@lru_cache
def others(rank: int, members: range) -> tuple[int, ...]:
    """All of `members` but `rank`, from the one after it on, so that not all begin with the same.

    >>> others(1, range(4))
    (2, 3, 0)
    """
    place = members.index(rank)
    return *members[place + 1 :], *members[:place]


def rows(
    comm: Comm, leaving: torch.Tensor, arriving: torch.Tensor, members: range
) -> None:
    """Row i of `leaving` goes to rank members[i], row i of `arriving` comes from there; one's own
    row is copied. All together.

    Shapes: (len(members), n) both, on all members, of which this rank is one, else `ShapeMismatch`.
    Cost: as `Comm.exchange`.
    """
    better = getattr(comm, "rows", None)
    if better is None:
        one_call(comm, leaving, arriving, members)
    else:
        better(leaving, arriving, members)


def one_call(
    comm: Comm, leaving: torch.Tensor, arriving: torch.Tensor, members: range
) -> None:
    """`rows` on any communicator."""
    into = dict(zip(members, arriving.unbind(), strict=True))
    out = dict(zip(members, leaving.unbind(), strict=True))
    into[comm.rank].copy_(out[comm.rank])
    peers = others(comm.rank, members)
    comm.exchange(*(Recv(into[peer], peer) for peer in peers),
                  *(Send(out[peer], peer) for peer in peers))
