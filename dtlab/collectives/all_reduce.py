"""All-reduce: every rank gets the sum of what all ranks hold. The heart of data parallelism."""

from __future__ import annotations

from typing import Any

import torch

from dtlab.collectives.broadcast import binomial as binomial_broadcast
from dtlab.collectives.broadcast import flat as flat_broadcast
from dtlab.collectives.call import call_for
from dtlab.collectives.reduce import binomial as binomial_reduce
from dtlab.collectives.reduce import flat as flat_reduce
from dtlab.collectives.registry import algorithm, cut, flattened, write_back
from dtlab.comm import Comm
from dtlab.reduction import Op, check_op, finish_average_


def all_reduce(
    comm: Comm, x: torch.Tensor, op: Op = "sum", algorithm: str = "ring", **options: Any
) -> torch.Tensor:
    """In place. Before: rank r holds x_r. After: every rank holds x_0 op x_1 op … Returns `x`.

    `x` has the same shape and dtype everywhere, else `ShapeMismatch`. op: as in
    `Comm.accumulate_`; a function is given pieces of vectors, in any order of the ranks. All ranks
    end with the same bits. Chapter: 05.
    """
    run, inner = call_for(comm, "all_reduce", algorithm, options, x, op=op)
    check_op(op, x.dtype)
    vector = flattened(x)
    run(inner, vector, op)
    finish_average_(vector, op, comm.size)
    return write_back(x, vector)


@algorithm("all_reduce", "flat")
def flat(comm: Comm, x: torch.Tensor, op: Op = "sum") -> torch.Tensor:
    """In place: reduce to rank 0, which then broadcasts, both one rank at a time.

    Cost: 2(p−1)(α + nβ) + (p−1)nγ. Rank 0 is the hot spot.
    """
    flat_reduce(comm, x, 0, op)
    return flat_broadcast(comm, x, 0)


@algorithm("all_reduce", "tree")
def tree(comm: Comm, x: torch.Tensor, op: Op = "sum") -> torch.Tensor:
    """In place: reduce to rank 0 up a binomial tree, broadcast down the same tree.

    Cost: 2⌈lg p⌉(α + nβ) + ⌈lg p⌉nγ. Few rounds, but every message carries all of x.
    """
    binomial_reduce(comm, x, 0, op)
    return binomial_broadcast(comm, x, 0)


@algorithm("all_reduce", "ring")
def ring(comm: Comm, x: torch.Tensor, op: Op = "sum") -> torch.Tensor:
    """In place: p chunks travel round the ring, first to be summed up, then to be handed out.

    Before: rank r holds x_r. Halfway: rank r holds the complete chunk r+1. After: all of it.
    Memory: one chunk. Cost: 2(p−1)α + 2(p−1)/p·nβ + (p−1)/p·nγ: no rank ever sends more than
    the least that any algorithm must. Source: Patarasuk & Yuan 2009.
    """
    p, me = comm.size, comm.rank
    right, left = (me + 1) % p, (me - 1) % p
    chunks = cut(x, p)
    inbox = torch.empty_like(chunks[0])
    for step in range(p - 1):  # reduce-scatter
        leaving, staying = chunks[(me - step) % p], chunks[(me - step - 1) % p]
        summand = inbox[: staying.numel()]
        comm.sendrecv(leaving, right, summand, left)
        comm.accumulate_(staying, summand, op)
    for step in range(p - 1):  # all-gather
        leaving, arriving = chunks[(me + 1 - step) % p], chunks[(me - step) % p]
        comm.sendrecv(leaving, right, arriving, left)
    return x
