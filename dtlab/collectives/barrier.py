"""Barrier: nobody leaves before everybody has come."""

from __future__ import annotations

import torch

from dtlab.collectives.registry import algorithm, choose
from dtlab.comm import Comm, Recv, Send


def barrier(comm: Comm, algorithm: str = "dissemination") -> None:
    """Wait until every rank has called it. Moves no bytes, only empty messages. Chapter: 04."""
    run = choose("barrier", algorithm)
    with comm.labelled(f"barrier(algorithm={algorithm})"):
        run(comm)


@algorithm("barrier", "dissemination")
def dissemination(comm: Comm) -> None:
    """In round k, tell the rank 2^k further on, and hear from the rank 2^k back.

    After round k a rank knows of the 2^(k+1) − 1 ranks behind it; after ⌈lg p⌉ rounds, of all.
    Cost: ⌈lg p⌉α. Source: Hensgen, Finkel, Manber 1988.
    """
    p, me = comm.size, comm.rank
    nothing, unused = torch.empty(0, device=comm.device), torch.empty(0, device=comm.device)
    distance = 1
    while distance < p:
        comm.exchange(
            Send(nothing, (me + distance) % p), Recv(unused, (me - distance) % p)
        )
        distance *= 2
