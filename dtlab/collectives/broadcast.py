"""Broadcast: every rank gets what the root has."""

from __future__ import annotations

from typing import Any

import torch

from dtlab.collectives.all_gather import ring as all_gather
from dtlab.collectives.call import call_for
from dtlab.collectives.registry import (
    algorithm,
    check_root,
    chunk_edges,
    cut,
    flattened,
    write_back,
)
from dtlab.comm import Comm, Recv, Send
from dtlab.cost.model import lg_ceil
from dtlab.cost.tree import subtree_size


def broadcast(
    comm: Comm, x: torch.Tensor, root: int = 0, algorithm: str = "binomial", **options: Any
) -> torch.Tensor:
    """In place. Before: the root holds x. After: every rank holds the root's x. Returns `x`.

    `x` has the same shape and dtype everywhere, else `ShapeMismatch`. Chapter: 04.
    """
    run, inner = call_for(
        comm, "broadcast", algorithm, options, x, writes=comm.rank != root, root=root
    )
    check_root(comm, root, "broadcast")
    vector = flattened(x)
    run(inner, vector, root)
    return write_back(x, vector) if comm.rank != root else x


@algorithm("broadcast", "flat")
def flat(comm: Comm, x: torch.Tensor, root: int = 0) -> torch.Tensor:
    """In place: the root sends x to each rank in turn.

    Cost: (p−1)(α + nβ). The root's port is the bottleneck, and all others are idle.
    """
    if comm.rank == root:
        for distance in range(1, comm.size):
            comm.send(x, (root + distance) % comm.size)
    else:
        comm.recv(x, root)
    return x


@algorithm("broadcast", "binomial")
def binomial(comm: Comm, x: torch.Tensor, root: int = 0) -> torch.Tensor:
    """In place: ranks that have x send it on; every round doubles them.

    Ranks are renumbered so that the root is 0. A rank's parent is its number without the lowest
    one-bit; its children set one bit below that. The farthest child comes first, for it is the root
    of the deepest subtree, unless p cuts that off.

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


@algorithm("broadcast", "chain")
def chain(comm: Comm, x: torch.Tensor, root: int = 0, segments: int = 8) -> torch.Tensor:
    """In place: x is cut into segments, which follow one another down a chain of ranks.

    While a rank hands segment i on, segment i+1 arrives. The best number of segments is
    √((p−2)nβ/α). Cost: (p−2+k)(α + nβ/k), k segments. Source: Thakur et al. 2005, §4.2.
    """
    p, me = comm.size, (comm.rank - root) % comm.size
    ahead, behind = (comm.rank + 1) % p, (comm.rank - 1) % p
    parts = cut(x, segments)
    for i in range(segments + 1):
        ops: list[Send | Recv] = []
        if i < segments and me:
            ops.append(Recv(parts[i], behind))
        if i and me < p - 1:
            ops.append(Send(parts[i - 1], ahead))
        comm.exchange(*ops)
    return x


@algorithm("broadcast", "scatter_allgather")
def scatter_allgather(comm: Comm, x: torch.Tensor, root: int = 0) -> torch.Tensor:
    """In place: scatter p chunks down a binomial tree, then gather them round a ring.

    For long vectors: every byte leaves the root once, not lg p times.
    Cost: (⌈lg p⌉ + p−1)α + 2(p−1)/p·nβ. Source: van de Geijn; Thakur et al. 2005, §4.2.
    """
    p = comm.size
    edges = chunk_edges(x.numel(), p)
    rotated = comm.subgroup([(root + i) % p for i in range(p)])  # the root is its rank 0
    me = rotated.rank
    last = me + subtree_size(me, p)  # my subtree's chunks are those from me to last
    if me:
        rotated.recv(x[edges[me] : edges[last]], me & me - 1)
    bit = 1 << lg_ceil(last - me)
    while bit > 1:
        bit //= 2
        rotated.send(x[edges[me + bit] : edges[min(me + 2 * bit, last)]], me + bit)
    all_gather(rotated, cut(x, p))
    return x
