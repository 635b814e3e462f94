"""Chunks travel round a ring: once round to be summed up, once more to be handed out.

`chunks` are views of one vector, one for each rank: see `registry.cut`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dtlab.comm import Comm, Recv, Send
from dtlab.reduction import Op
from dtlab.relay import relay


def all_reduce_(comm: Comm, chunks: Sequence[torch.Tensor], op: Op = "sum") -> None:
    """In place. Before: rank r holds its summand of every chunk. After: all hold all sums.

    Both halves below, without a stop between them. Cost: 2(p−1)(α + cβ) + (p−1)cγ, c bytes in the
    largest chunk.
    """
    p, me = comm.size, comm.rank
    relay(comm, tour(comm, chunks), (me + 1) % p, (me - 1) % p, op, adding=p - 1)


def reduce_scatter_(comm: Comm, chunks: Sequence[torch.Tensor], op: Op = "sum") -> None:
    """In place. Before: rank r holds its summand of every chunk. After: rank r has all of r+1.

    Each chunk gathers one summand a step. Cost: (p−1)(α + c(β + γ)).
    """
    p, me = comm.size, comm.rank
    relay(comm, tour(comm, chunks)[:p], (me + 1) % p, (me - 1) % p, op, adding=p - 1)


def all_gather_(comm: Comm, chunks: Sequence[torch.Tensor]) -> None:
    """In place. Before: rank r has all of chunk r+1. After: every rank has all chunks.

    Each complete chunk goes once round. Cost: (p−1)(α + cβ).
    """
    p, me = comm.size, comm.rank
    relay(comm, tour(comm, chunks)[p - 1 :], (me + 1) % p, (me - 1) % p)


def tour(comm: Comm, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The chunks in the order in which they pass rank r: its own, r, then what comes from the left:
    r−1, r−2, …, halfway r+1, which is complete there; then once more r, r−1, … The last one stays.
    """
    p = comm.size
    return [chunks[(comm.rank - step) % p] for step in range(2 * p - 1)]


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
