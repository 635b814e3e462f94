"""The two halves of every ring: chunks travel round, first to be summed up, then to be handed out.

`edges` says where a vector is cut: chunk c is x[edges[c]:edges[c + 1]], one for each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from dtlab.comm import Comm, Recv, Send
from dtlab.reduction import Op


def reduce_scatter_(
    comm: Comm, x: torch.Tensor, edges: Sequence[int], op: Op = "sum"
) -> torch.Tensor:
    """In place. After: chunk r+1 is complete at rank r.

    Cost: (p−1)(α + c(β + γ)), c bytes in the largest chunk.
    """
    p, me = comm.size, comm.rank
    right, left = (me + 1) % p, (me - 1) % p
    inbox = x.new_empty(max(b - a for a, b in pairwise(edges)))
    for step in range(p - 1):
        leaving, arriving = (me - step) % p, (me - step - 1) % p
        kept = x[edges[arriving] : edges[arriving + 1]]
        summand = inbox[: kept.numel()]
        comm.sendrecv(x[edges[leaving] : edges[leaving + 1]], right, summand, left)
        comm.accumulate_(kept, summand, op)
    return x


def all_gather_(comm: Comm, x: torch.Tensor, edges: Sequence[int]) -> torch.Tensor:
    """In place. Before: chunk r+1 is complete at rank r. After: all are, everywhere.

    Cost: (p−1)(α + cβ), c bytes in the largest chunk.
    """
    p, me = comm.size, comm.rank
    right, left = (me + 1) % p, (me - 1) % p
    for step in range(p - 1):
        leaving, arriving = (me + 1 - step) % p, (me - step) % p
        comm.sendrecv(x[edges[leaving] : edges[leaving + 1]], right,
                      x[edges[arriving] : edges[arriving + 1]], left)
    return x


class Lap:
    """One rank's part in a ring over `cycle`, step by step, so that several rings can be
    walked at once: `ops(step)` is what to exchange, `after(step)` what to do then."""

    def __init__(self, comm: Comm, x: torch.Tensor, cycle: list[int], edges: Sequence[int], op: Op):
        self.comm, self.x, self.edges, self.op = comm, x, edges, op
        self.p, self.me = len(cycle), cycle.index(comm.rank)
        self.right, self.left = cycle[(self.me + 1) % self.p], cycle[self.me - 1]
        self.inbox = x.new_empty(max(b - a for a, b in pairwise(edges)))

    def chunk(self, number: int) -> torch.Tensor:
        number %= self.p
        return self.x[self.edges[number] : self.edges[number + 1]]

    def ops(self, step: int) -> Iterator[Send | Recv]:
        arriving = self.chunk(self.me - step - 1)
        into = self.inbox[: arriving.numel()] if step < self.p - 1 else arriving
        yield Send(self.chunk(self.me - step), self.right)
        yield Recv(into, self.left)

    def after(self, step: int) -> None:
        if step < self.p - 1:
            arriving = self.chunk(self.me - step - 1)
            self.comm.accumulate_(arriving, self.inbox[: arriving.numel()], self.op)
