"""The two halves of every ring: chunks travel round, first to be summed up, then to be handed out.

`chunks` are views of one vector, one for each rank: see `registry.cut`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dtlab.comm import Comm, Recv, Send
from dtlab.reduction import Op
from dtlab.relay import relay


def reduce_scatter_(comm: Comm, chunks: Sequence[torch.Tensor], op: Op = "sum") -> None:
    """In place. Before: rank r holds its summand of every chunk. After: rank r has all of r+1.

    Each chunk gathers one summand a step. Memory: two chunks. Cost: (p−1)(α + c(β + γ)), c bytes in
    the largest chunk.
    """
    p, me = comm.size, comm.rank
    right, left = (me + 1) % p, (me - 1) % p
    leaving = [chunks[(me - step) % p] for step in range(p - 1)]
    staying = [chunks[(me - step - 1) % p] for step in range(p - 1)]
    inboxes = comm.scratch(chunks[0], rows=2)  # while one is added, the next may fill
    rooms = [{c.numel(): inbox[: c.numel()] for c in (chunks[0], chunks[-1])} for inbox in inboxes]
    summands = (rooms[step % 2][chunk.numel()] for step, chunk in enumerate(staying))
    arriving = relay(comm, zip(leaving, summands, strict=True), right, left)
    for chunk, summand in zip(staying, arriving, strict=True):
        comm.accumulate_(chunk, summand, op)


def all_gather_(comm: Comm, chunks: Sequence[torch.Tensor]) -> None:
    """In place. Before: rank r has all of chunk r+1. After: every rank has all chunks.

    Each complete chunk goes once round. Cost: (p−1)(α + cβ), c bytes in the largest chunk.
    """
    p, me = comm.size, comm.rank
    right, left = (me + 1) % p, (me - 1) % p
    moves = ((chunks[(me + 1 - step) % p], chunks[(me - step) % p]) for step in range(p - 1))
    for _ in relay(comm, moves, right, left):
        pass  # it has come to where it belongs


def one_back(chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same chunks, numbered so that "chunk r+1" above is the one called r here.

    For whoever wants rank r to begin, or end, with chunk r.
    """
    return [chunks[i - 1] for i in range(len(chunks))]


class Lap:
    """One rank's part in both halves of a ring over `cycle`, step by step, so that several rings
    can be walked at once: `ops(step)` is what to exchange, `after(step)` what to do then."""

    def __init__(self, comm: Comm, chunks: Sequence[torch.Tensor], cycle: list[int], op: Op):
        self.comm, self.chunks, self.op = comm, chunks, op
        self.p, self.me = len(cycle), cycle.index(comm.rank)
        self.right, self.left = cycle[(self.me + 1) % self.p], cycle[self.me - 1]
        self.inbox = torch.empty_like(chunks[0])  # no scratch: several laps receive at once

    def ops(self, step: int) -> Iterator[Send | Recv]:
        leaving, arriving = (self.chunks[(self.me - step - i) % self.p] for i in (0, 1))
        adding = step < self.p - 1
        yield Send(leaving, self.right)
        yield Recv(self.inbox[: arriving.numel()] if adding else arriving, self.left)

    def after(self, step: int) -> None:
        if step < self.p - 1:
            arriving = self.chunks[(self.me - step - 1) % self.p]
            self.comm.accumulate_(arriving, self.inbox[: arriving.numel()], self.op)
