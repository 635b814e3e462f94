"""All-to-all: every rank has a part for every rank. A transpose of the matrix of parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtlab import relay
from dtlab.collectives.call import call_for
from dtlab.collectives.gather import linear as gather_linear
from dtlab.collectives.registry import (
    algorithm,
    check_parts,
    room_for,
    rows_of,
)
from dtlab.collectives.scatter import linear as scatter_linear
from dtlab.collectives.view import lines
from dtlab.comm import Comm
from dtlab.cost.model import best_divisor

Rows = torch.Tensor | Sequence[torch.Tensor]  # a row for each rank

def all_to_all(
    comm: Comm, parts: torch.Tensor, algorithm: str = "pairwise", out: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Before: rank r holds `parts`, of shape (p, *shape). After: it has a tensor of the same shape
    whose row s is rank s's parts[r]: in `out`, if given (not `parts` itself), else in a new one.
    Returns it. `parts` stays as it is.

    Shapes and dtypes are equal everywhere, else `ShapeMismatch`. Chapter: 04.
    """
    call = call_for(comm, "all_to_all", algorithm, options, parts)
    check_parts(comm, parts, "all_to_all")
    result = room_for(comm, out, tuple(parts.shape), parts, "all_to_all")
    call(comm, rows_of(parts), rows_of(result))
    return result


@algorithm("all_to_all", "linear")
def linear(comm: Comm, rows: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Fill `received`: post everything at once and let the network sort it out.

    Cost on a network without contention inside: α + (p−1)/p·nβ; n bytes in a rank's rows together.
    """
    relay.rows(comm, rows, received, range(comm.size))
    return received


@algorithm("all_to_all", "pairwise")
def pairwise(comm: Comm, rows: Rows, received: Rows) -> Rows:
    """Fill `received`: in step k, send to the rank k further on, receive from the one k back.

    Nobody ever receives from two at once. Cost: (p−1)α + (p−1)/p·nβ.
    """
    p, me = comm.size, comm.rank
    received[me].copy_(rows[me])
    for distance in range(1, p):
        to, source = (me + distance) % p, (me - distance) % p
        comm.sendrecv(rows[to], to, received[source], source)
    return received


@algorithm("all_to_all", "mesh")
def mesh(comm: Comm, rows: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Fill `received`, on a grid of ranks: parts first go along the rows, to the column they are
    for, then along the columns, each time all that have the same way as one message.

    X + Y − 2 messages a rank instead of p − 1, for which nearly all parts travel twice: for small
    ones. Cost: 2α + (2p − X − Y)/p·nβ.
    Source: Kalé, Kumar, Varadarajan 2003, "A framework for collective personalized communication".
    """
    y, n = best_divisor(comm.size), rows.shape[1]
    x = comm.size // y
    row, column = lines(comm.rank, x, comm.size)
    leaving = torch.empty_like(received)
    leaving.view(x, y, n).copy_(rows.view(y, x, n).transpose(0, 1))
    relay.rows(comm, leaving.view(x, y * n), received.view(x, y * n), row)
    # Now `received` has, for each rank of my row, what it has for my column, from top to bottom.
    leaving.view(y, x, n).copy_(received.view(x, y, n).transpose(0, 1))
    relay.rows(comm, leaving.view(y, x * n), received.view(y, x * n), column)
    return received


@algorithm("all_to_all", "central")
def central(comm: Comm, rows: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Fill `received`: rank 0 gathers the rows of all, turns the matrix, and scatters it.

    Rank 0 has p times the work of the others; but there are 2(p−1) messages in all, no more, and
    ranks that share a few cores pay for all. Cost: 2(p−1)(α + nβ). Memory at rank 0: 2pn.
    """
    p, n = rows.shape
    mine = rows.view(p * n)
    everyone = turned = None
    if comm.rank == 0:
        everyone, turned = mine.new_empty((p, *mine.shape)), mine.new_empty((p, *mine.shape))
        everyone[0] = mine
    gather_linear(comm, mine, everyone)
    if everyone is not None and turned is not None:
        turned.view(p, p, n).copy_(everyone.view(p, p, n).transpose(0, 1))
    scatter_linear(comm, turned, received.view(p * n))
    return received


@algorithm("all_to_all", "bruck")
def bruck(comm: Comm, rows: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Fill `received`: a part that must go d ranks on hops 2^k ahead for each one-bit k of d.

    Few messages, but parts are forwarded: for small parts only. Cost: ⌈lg p⌉α + about
    (n/2)⌈lg p⌉β. Source: Bruck et al. 1997.
    """
    p, me = comm.size, comm.rank
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
    return received.copy_(travelling.flip(0).roll(me + 1, dims=0))
