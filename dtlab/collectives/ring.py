"""The two halves of every ring: chunks travel round, first to be summed up, then to be handed out.

`chunks` are views of one vector, one for each rank: see `registry.cut`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtlab.comm import Comm
from dtlab.reduction import Op


def reduce_scatter_(comm: Comm, chunks: Sequence[torch.Tensor], op: Op = "sum") -> None:
    """In place. Before: rank r holds its summand of every chunk. After: rank r has all of r+1.

    Each chunk gathers one summand a step. Memory: one chunk. Cost: (p−1)(α + c(β + γ)), c bytes in
    the largest chunk.
    """
    p, me = comm.size, comm.rank
    right, left = (me + 1) % p, (me - 1) % p
    inbox = comm.scratch(chunks[0])
    small = chunks[-1].numel()
    room = {small: inbox[:small], inbox.numel(): inbox}  # chunks have no other sizes
    for step in range(p - 1):
        leaving, staying = chunks[(me - step) % p], chunks[(me - step - 1) % p]
        summand = room[staying.numel()]
        comm.sendrecv(leaving, right, summand, left)
        comm.accumulate_(staying, summand, op)


def all_gather_(comm: Comm, chunks: Sequence[torch.Tensor]) -> None:
    """In place. Before: rank r has all of chunk r+1. After: every rank has all chunks.

    Each complete chunk goes once round. Cost: (p−1)(α + cβ), c bytes in the largest chunk.
    """
    p, me = comm.size, comm.rank
    right, left = (me + 1) % p, (me - 1) % p
    for step in range(p - 1):
        leaving, arriving = chunks[(me + 1 - step) % p], chunks[(me - step) % p]
        comm.sendrecv(leaving, right, arriving, left)
