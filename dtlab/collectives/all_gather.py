"""All-gather: every rank gets what each rank holds, in order of the ranks."""

from __future__ import annotations

from typing import Any

import torch

from dtlab.collectives.call import call_for
from dtlab.collectives.registry import Rows, algorithm, detached, output_for
from dtlab.comm import Comm
from dtlab.cost.folding import fold


def all_gather(
    comm: Comm, x: torch.Tensor, algorithm: str = "ring", out: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Before: rank r holds x_r. After: every rank has [x_0, x_1, …], of shape (p, *x.shape): in
    `out`, if given, else in a new tensor. Returns it.

    Shapes and dtypes are equal everywhere, else `ShapeMismatch`. `x` stays as it is. Chapter: 04.
    """
    run, inner = call_for(comm, "all_gather", algorithm, options, x, comm.size, writes=False)
    result = output_for(comm, out, (comm.size, *x.shape), x, "all_gather")
    rows = detached(result).view(comm.size, x.numel())
    rows[comm.rank] = x.detach().reshape(-1)
    run(inner, rows)
    return result


@algorithm("all_gather", "ring")
def ring(comm: Comm, rows: Rows) -> Rows:
    """In place. Before: row r of rank r is filled. After: all rows are, everywhere.

    Every row goes once round the ring. Cost: (p−1)α + (p−1)/p·nβ, n bytes in all rows together.
    """
    p, me = comm.size, comm.rank
    right, left = (me + 1) % p, (me - 1) % p
    for step in range(p - 1):
        leaving, arriving = rows[(me - step) % p], rows[(me - step - 1) % p]
        comm.sendrecv(leaving, right, arriving, left)
    return rows


@algorithm("all_gather", "recursive_doubling")
def recursive_doubling(comm: Comm, rows: torch.Tensor) -> torch.Tensor:
    """In place: in each round, swap all that you have with a partner twice as far away.

    Cost, p a power of two: lg p·α + (p−1)/p·nβ. Else the odd ones of the first 2r ranks fold into
    their neighbours: one row more before, all rows after. Source: Thakur et al. 2005, §4.1.
    """
    folding, me = fold(comm.size), comm.rank
    place = folding.place_of(me)
    if place is None:
        comm.send(rows[me], me - 1)
        comm.recv(rows, me - 1)
        return rows
    folded = place < folding.extra
    if folded:
        comm.recv(rows[me + 1], me + 1)
    distance = 1
    while distance < folding.core:
        mine, theirs = place & -distance, (place ^ distance) & -distance
        partner = folding.rank_of(place ^ distance)
        have = rows[folding.rank_of(mine) : folding.rank_of(mine + distance)]
        lack = rows[folding.rank_of(theirs) : folding.rank_of(theirs + distance)]
        comm.sendrecv(have, partner, lack, partner)
        distance *= 2
    if folded:
        comm.send(rows, me + 1)
    return rows


@algorithm("all_gather", "bruck")
def bruck(comm: Comm, rows: torch.Tensor) -> torch.Tensor:
    """In place: in round k, send your first 2^k rows to the rank 2^k back, and receive as many
    from the rank 2^k ahead.

    Works for any p in ⌈lg p⌉ rounds, on a copy in which one's own row comes first; the last round
    sends only what is still missing. Cost: ⌈lg p⌉α + (p−1)/p·nβ. Source: Bruck et al. 1997.
    """
    p, me = comm.size, comm.rank
    held = torch.empty_like(rows)  # held[i] will be the row of rank me + i
    held[0] = rows[me]
    have = 1
    while have < p:
        more = min(have, p - have)
        comm.sendrecv(held[:more], (me - have) % p, held[have : have + more], (me + have) % p)
        have += more
    rows.copy_(held.roll(me, dims=0))
    return rows
