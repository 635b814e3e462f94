"""Barrier: no rank leaves before all have entered."""

from __future__ import annotations

from typing import Any

import torch

from dtlab.collectives.broadcast import binomial as binomial_broadcast
from dtlab.collectives.broadcast import flat as flat_broadcast
from dtlab.collectives.call import call_for
from dtlab.collectives.reduce import binomial as binomial_reduce
from dtlab.collectives.reduce import flat as flat_reduce
from dtlab.collectives.registry import algorithm
from dtlab.comm import Comm


def barrier(comm: Comm, algorithm: str = "dissemination", **options: Any) -> None:
    """Wait until every rank has called it. Moves no bytes, only empty messages. Chapter: 04b."""
    run, inner = call_for(comm, "barrier", algorithm, options)
    run(inner)


def _nothing(comm: Comm) -> torch.Tensor:
    """Return an empty tensor of one dtype, whatever each rank's default is."""
    return torch.empty(0, dtype=torch.float32, device=comm.device)


@algorithm("barrier", "central")
def central(comm: Comm) -> None:
    """All ranks send to rank 0, which then sends to all. Cost: 2(p−1)α."""
    nothing = _nothing(comm)
    flat_reduce(comm, nothing)
    flat_broadcast(comm, nothing)


@algorithm("barrier", "tree")
def tree(comm: Comm) -> None:
    """Empty messages go up a binomial tree to rank 0, and down again. Cost: 2⌈lg p⌉α."""
    nothing = _nothing(comm)
    binomial_reduce(comm, nothing)
    binomial_broadcast(comm, nothing)


@algorithm("barrier", "dissemination")
def dissemination(comm: Comm) -> None:
    """In round k, send to the rank 2^k further on, and receive from the rank 2^k back.

    After round k a rank knows of the 2^(k+1) − 1 ranks behind it; after ⌈lg p⌉ rounds, of all.
    Cost: ⌈lg p⌉α. Source: Hensgen, Finkel, Manber 1988.
    """
    p, me = comm.size, comm.rank
    nothing, unused = _nothing(comm), _nothing(comm)
    distance = 1
    while distance < p:
        comm.sendrecv(nothing, (me + distance) % p, unused, (me - distance) % p)
        distance *= 2
