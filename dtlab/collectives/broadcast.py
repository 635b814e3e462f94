"""Broadcast: what the root has, everyone gets."""

from __future__ import annotations

import torch

from dtlab.collectives.registry import (
    algorithm,
    check_root,
    check_tensor,
    choose,
    flattened,
    signature,
    write_back,
)
from dtlab.comm import Comm


def broadcast(
    comm: Comm, x: torch.Tensor, root: int = 0, algorithm: str = "binomial"
) -> torch.Tensor:
    """In place. Before: the root holds x. After: every rank holds the root's x. Returns `x`.

    `x` has the same shape and dtype everywhere, else `ShapeMismatch`. Chapter: 04.
    """
    run = choose("broadcast", algorithm)
    check_tensor(comm, x, "broadcast")
    check_root(comm, root, "broadcast")
    vector = flattened(x)
    with comm.labelled(signature("broadcast", x, algorithm=algorithm, root=root)):
        run(comm, vector, root)
    return write_back(x, vector)


@algorithm("broadcast", "flat")
def flat(comm: Comm, x: torch.Tensor, root: int = 0) -> torch.Tensor:
    """In place: the root sends x to each rank in turn.

    Cost: (p−1)(α + nβ). The root's port is the bottleneck, and everyone else is idle.
    """
    if comm.rank == root:
        for distance in range(1, comm.size):
            comm.send(x, (root + distance) % comm.size)
    else:
        comm.recv(x, root)
    return x


@algorithm("broadcast", "binomial")
def binomial(comm: Comm, x: torch.Tensor, root: int = 0) -> torch.Tensor:
    """In place: whoever has x sends it on; every round doubles the ranks that have it.

    Ranks are renumbered so that the root is 0. A rank's parent is its number without the lowest
    one-bit; its children set one bit below that. The farthest child comes first, for it has the
    largest subtree to serve.

    Cost: ⌈lg p⌉(α + nβ). Source: Thakur, Rabenseifner, Gropp 2005, §4.2.
    """
    p = comm.size
    me = (comm.rank - root) % p
    bit = 1
    while bit < p and not me & bit:
        bit *= 2  # ends at my lowest one-bit; for the root, beyond all ranks
    if me:
        comm.recv(x, (me - bit + root) % p)
    while bit > 1:
        bit //= 2
        if me + bit < p:
            comm.send(x, (me + bit + root) % p)
    return x
