"""Reduce-scatter: rank r gets the sum of all ranks' r-th parts."""

from __future__ import annotations

from typing import Any

import torch

from dtlab.checks import check_flag
from dtlab.collectives.call import call_for
from dtlab.collectives.registry import Rows, algorithm, check_parts, detached, write_back
from dtlab.comm import Comm
from dtlab.cost.folding import fold
from dtlab.reduction import Op, check_op, finish_average_


def reduce_scatter(
    comm: Comm, parts: torch.Tensor, op: Op = "sum", algorithm: str = "ring",
    overwrite: bool = False, **options: Any,
) -> torch.Tensor:
    """Before: each rank holds `parts`, of shape (p, *shape). After: rank r has the reduction of all
    ranks' parts[r], of shape `shape`, which is returned.

    Shapes and dtypes are equal everywhere, else `ShapeMismatch`; `op` as in `all_reduce`. `parts`
    stays as it is, for the algorithms work on a copy; with `overwrite` they work on `parts`, if it
    is contiguous, so that no more memory is needed than a row, and the result is its row.
    Chapter: 04.
    """
    check_flag("overwrite", overwrite)
    run, inner = call_for(comm, "reduce_scatter", algorithm, options, parts, writes=overwrite,
                          op=op)
    check_parts(comm, parts, "reduce_scatter")
    check_op(op, parts.dtype)
    rows = detached(parts).reshape(comm.size, -1)
    rows = rows if overwrite else rows.clone()
    run(inner, rows, op)
    mine = rows[comm.rank].view(parts.shape[1:])
    mine = write_back(detached(parts)[comm.rank], mine) if overwrite else mine.clone()
    return finish_average_(mine, op, comm.size)


@algorithm("reduce_scatter", "ring")
def ring(comm: Comm, rows: Rows, op: Op = "sum") -> Rows:
    """In place: row r is complete at rank r; the other rows hold partial sums.

    Each row goes once round the ring, starting right of its owner, and gathers a summand at every
    rank. Rows may be the chunks of a vector, the largest first.
    Cost: (p−1)α + (p−1)/p·n(β + γ), n bytes in all rows together.
    """
    p, me = comm.size, comm.rank
    right, left = (me + 1) % p, (me - 1) % p
    inbox = torch.empty_like(rows[0])
    for step in range(p - 1):
        leaving, staying = rows[(me - step - 1) % p], rows[(me - step - 2) % p]
        summand = inbox[: staying.numel()]
        comm.sendrecv(leaving, right, summand, left)
        comm.accumulate_(staying, summand, op)
    return rows


@algorithm("reduce_scatter", "pairwise")
def pairwise(comm: Comm, rows: Rows, op: Op = "sum") -> Rows:
    """In place: in step k, hand the rank k further on its row, and add what comes from k back.

    Every row goes straight to its owner. Cost: (p−1)α + (p−1)/p·n(β + γ).
    """
    p, me = comm.size, comm.rank
    summand = torch.empty_like(rows[me])
    for distance in range(1, p):
        to, source = (me + distance) % p, (me - distance) % p
        comm.sendrecv(rows[to], to, summand, source)
        comm.accumulate_(rows[me], summand, op)
    return rows


@algorithm("reduce_scatter", "recursive_halving")
def recursive_halving(comm: Comm, rows: torch.Tensor, op: Op = "sum") -> torch.Tensor:
    """In place: swap halves with a partner far away, keep and add up one half; repeat, nearer.

    Cost, p a power of two: lg p·α + (p−1)/p·n(β + γ). Else, by folding: all rows more before, one
    more after. Source: Thakur et al. 2005, §4.3.
    """
    folding, me = fold(comm.size), comm.rank
    place = folding.place_of(me)
    if place is None:
        comm.send(rows, me - 1)
        comm.recv(rows[me], me - 1)
        return rows
    inbox = torch.empty_like(rows)
    if place < folding.extra:
        comm.recv(inbox, me + 1)
        comm.accumulate_(rows, inbox, op)
    distance = folding.core // 2
    while distance:
        mine, theirs = place & -distance, (place ^ distance) & -distance
        keep = rows[folding.rank_of(mine) : folding.rank_of(mine + distance)]
        give = rows[folding.rank_of(theirs) : folding.rank_of(theirs + distance)]
        partner = folding.rank_of(place ^ distance)
        summands = inbox[: len(keep)]
        comm.sendrecv(give, partner, summands, partner)
        comm.accumulate_(keep, summands, op)
        distance //= 2
    if place < folding.extra:
        comm.send(rows[me + 1], me + 1)
    return rows
