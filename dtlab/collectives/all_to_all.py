"""All-to-all: every rank has a part for every rank; together they transpose the matrix of parts."""

from __future__ import annotations

from typing import Any

import torch

from dtlab.collectives.call import call_for
from dtlab.collectives.gather import linear_nonblocking as gather
from dtlab.collectives.registry import Rows, algorithm, check_parts, output_for, rows_of
from dtlab.collectives.scatter import linear_nonblocking as scatter
from dtlab.comm import Comm, Recv, Send
from dtlab.cost.model import best_divisor


def all_to_all(
    comm: Comm, parts: torch.Tensor, algorithm: str = "pairwise", out: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Before: rank r holds `parts`, of shape (p, *shape). After: it has a tensor of the same shape
    whose row s is rank s's parts[r]: in `out`, if given (not `parts` itself), else in a new one.
    Returns it. `parts` stays as it is.

    Shapes and dtypes are equal everywhere, else `ShapeMismatch`. Chapter: 04b.
    """
    run, inner = call_for(comm, "all_to_all", algorithm, options, parts, writes=False)
    check_parts(comm, parts, "all_to_all")
    result = output_for(comm, out, tuple(parts.shape), parts, "all_to_all")
    run(inner, rows_of(parts), rows_of(result))
    return result


@algorithm("all_to_all", "linear")
def linear(comm: Comm, rows: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Fill `received`: post everything at once and let the network sort it out.

    Every rank begins with the one after it, so that not all send to the same one first.
    Cost, b = n/p, on a network without contention inside: α + bβ + (p−2)·max(α, bβ).
    """
    p, me = comm.size, comm.rank
    received[me].copy_(rows[me])
    others = [(me + distance) % p for distance in range(1, p)]
    comm.exchange(*(Recv(received[rank], rank) for rank in others),
                  *(Send(rows[rank], rank) for rank in others))
    return received


@algorithm("all_to_all", "pairwise")
def pairwise(comm: Comm, rows: Rows, received: Rows) -> Rows:
    """Fill `received`: in step k, send to the rank k further on, receive from the one k back.

    No rank ever receives from two at once. Cost: (p−1)α + (p−1)/p·nβ.
    """
    p, me = comm.size, comm.rank
    received[me].copy_(rows[me])
    for distance in range(1, p):
        to, source = (me + distance) % p, (me - distance) % p
        comm.sendrecv(rows[to], to, received[source], source)
    return received


@algorithm("all_to_all", "mesh")
def mesh(comm: Comm, rows: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Fill `received`, on a grid of X columns and Y rows: parts first go along the rows, to the
    column they are for, then along the columns, each time all for one rank as one message.

    X + Y − 2 messages a rank instead of p − 1, for which nearly all parts travel twice: for small
    ones. Cost: that of two linear ones, over X ranks with messages of Y parts, then the other way
    round: at most (X + Y − 2)α + (2p − X − Y)/p·nβ.
    Source: Kalé, Kumar, Varadarajan 2003, "A framework for collective personalized communication".
    """
    p, me, n = comm.size, comm.rank, rows.shape[1]
    y = best_divisor(p)
    x = p // y
    row = comm.subgroup(range(me - me % x, me - me % x + x))
    column = comm.subgroup(range(me % x, p, x))
    leaving = torch.empty_like(received)
    leaving.view(x, y, n).copy_(rows.view(y, x, n).transpose(0, 1))
    linear(row, leaving.view(x, y * n), received.view(x, y * n))
    # Now `received` has, for each rank of my row, what it has for my column, from top to bottom.
    leaving.view(y, x, n).copy_(received.view(x, y, n).transpose(0, 1))
    linear(column, leaving.view(y, x * n), received.view(y, x * n))
    return received


@algorithm("all_to_all", "central")
def central(comm: Comm, rows: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Fill `received`: rank 0 gathers the rows of all, transposes the matrix, and scatters it.

    Rank 0 has p times the work of the others; but there are 2(p−1) messages in all, no more, and
    ranks that share a few cores pay for all. Memory at rank 0: 2pn.
    Cost: at most 2(p−1)(α + nβ), less what overlaps in the two linear halves.
    """
    p, n = rows.shape
    mine = rows.view(p * n)
    gathered = transposed = None
    if comm.rank == 0:
        gathered, transposed = mine.new_empty((p, p * n)), mine.new_empty((p, p * n))
        gathered[0] = mine
    gather(comm, mine, gathered)
    if gathered is not None and transposed is not None:
        transposed.view(p, p, n).copy_(gathered.view(p, p, n).transpose(0, 1))
    scatter(comm, transposed, received.view(p * n))
    return received


@algorithm("all_to_all", "bruck")
def bruck(comm: Comm, rows: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Fill `received`: a part that must go d ranks on hops 2^k ahead for each one-bit k of d.

    Few messages, but parts are forwarded: for small parts only. Cost: ⌈lg p⌉α + about
    (n/2)⌈lg p⌉β. Source: Bruck et al. 1997.
    """
    p, me = comm.size, comm.rank
    # As bytes, for torch can't select from and flip all that it can hold.
    rows, received_bytes = rows.resolve_conj().view(torch.uint8), received.view(torch.uint8)
    travelling = rows.roll(-me, dims=0)  # travelling[d] must go d ranks further on
    hop = 1
    while hop < p:
        moving = torch.tensor([d for d in range(p) if d & hop], device=rows.device)
        leaving = travelling.index_select(0, moving)
        arriving = torch.empty_like(leaving)
        comm.sendrecv(leaving, (me + hop) % p, arriving, (me - hop) % p)
        travelling.index_copy_(0, moving, arriving)
        hop *= 2
    # travelling[d] has come from d ranks back: it is row me − d.
    received_bytes.copy_(travelling.flip(0).roll(me + 1, dims=0))
    return received
