"""Reduce: the root gets the sum (or product, …) of what all ranks hold."""

from __future__ import annotations

from typing import Any

import torch

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
from dtlab.cost.folding import fold
from dtlab.cost.tree import subtree_size
from dtlab.reduction import Op, check_op, finish_average_, swapped


def reduce(
    comm: Comm, x: torch.Tensor, root: int = 0, op: Op = "sum", algorithm: str = "binomial",
    **options: Any,
) -> torch.Tensor:
    """In place at the root. Before: rank r holds x_r. After: the root holds x_0 op x_1 op …

    Other ranks keep their x. Returns `x`. Shapes and dtypes are equal everywhere, else
    `ShapeMismatch`. op: as in `Comm.accumulate_`; a function is given pieces of vectors, in any
    order of the ranks. Chapter: 04.
    """
    run, inner = call_for(
        comm, "reduce", algorithm, options, x, writes=comm.rank == root, op=op, root=root
    )
    check_root(comm, root, "reduce")
    check_op(op, x.dtype)
    vector = flattened(x)
    run(inner, vector, root, op)  # which leaves the vectors of other ranks as they are
    if comm.rank == root:
        write_back(x, finish_average_(vector, op, comm.size))
    return x


@algorithm("reduce", "flat")
def flat(comm: Comm, x: torch.Tensor, root: int = 0, op: Op = "sum") -> torch.Tensor:
    """In place at the root: it receives from each rank in turn, and adds.

    Cost: (p−1)(α + nβ + nγ).
    """
    if comm.rank != root:
        comm.send(x, root)
        return x
    inbox = torch.empty_like(x)
    for distance in range(1, comm.size):
        comm.recv(inbox, (root + distance) % comm.size)
        comm.accumulate_(x, inbox, op)
    return x


@algorithm("reduce", "binomial")
def binomial(comm: Comm, x: torch.Tensor, root: int = 0, op: Op = "sum") -> torch.Tensor:
    """In place at the root: the broadcast's tree, upwards.

    In round k, ranks whose k-th bit is the lowest that is set send their sum to their parent. Ranks
    on the way keep their x: they add up where their first summand came in.
    Cost: ⌈lg p⌉(α + nβ + nγ). Source: Thakur, Rabenseifner, Gropp 2005, §4.5.
    """
    p = comm.size
    me = (comm.rank - root) % p
    size = subtree_size(me, p)
    total = x
    bit = 1
    while bit < size:
        inbox = torch.empty_like(x)
        comm.recv(inbox, (me + bit + root) % p)
        if me and bit == 1:
            total = comm.accumulate_(inbox, x, swapped(op))
        else:
            comm.accumulate_(total, inbox, op)
        bit *= 2
    if me:
        comm.send(total, ((me & me - 1) + root) % p)
    return x


@algorithm("reduce", "chain")
def chain(comm: Comm, x: torch.Tensor, root: int = 0, op: Op = "sum",
          segments: int = 8) -> torch.Tensor:
    """In place at the root: the broadcast's chain, backwards.

    While a rank hands the sum of segment i on, segment i+1 arrives from ahead. Ranks on the way
    work on a copy. Cost: (p−2+k)(α + nβ/k + nγ/k), k segments.
    """
    p, me = comm.size, (comm.rank - root) % comm.size
    ahead, behind = (comm.rank + 1) % p, (comm.rank - 1) % p
    if 0 < me < p - 1:
        x = x.clone()
    parts = cut(x, segments)
    inbox = torch.empty_like(parts[0])
    for i in range(segments + 1):
        ops: list[Send | Recv] = []
        if i < segments and me < p - 1:
            ops.append(Recv(inbox[: parts[i].numel()], ahead))
        if i and me:
            ops.append(Send(parts[i - 1], behind))
        comm.exchange(*ops)
        if i < segments and me < p - 1:
            comm.accumulate_(parts[i], inbox[: parts[i].numel()], op)
    return x


@algorithm("reduce", "rabenseifner")
def rabenseifner(comm: Comm, x: torch.Tensor, root: int = 0, op: Op = "sum") -> torch.Tensor:
    """In place at the root: reduce-scatter by halving, then gather. The others work on a copy.

    For long vectors: no rank adds more than (p−1)/p of x. Cost, p a power of two:
    2 lg p·α + 2(p−1)/p·nβ + (p−1)/p·nγ; else, by folding, α + n(β + γ) more.
    Source: Rabenseifner 2004; Thakur et al. 2005, §4.4.
    """
    p = comm.size
    rotated = comm.subgroup([(root + i) % p for i in range(p)])  # the root is its rank 0
    if rotated.rank:
        x = x.clone()
    folding = fold(p)
    place = folding.place_of(rotated.rank)
    if place is None:
        rotated.send(x, rotated.rank - 1)
        return x
    inbox = torch.empty_like(x)
    if place < folding.extra:
        rotated.recv(inbox, rotated.rank + 1)
        rotated.accumulate_(x, inbox, op)
    edges = chunk_edges(x.numel(), folding.core)
    distance = folding.core // 2
    while distance:  # swap halves, add one
        mine, theirs = place & -distance, (place ^ distance) & -distance
        keep = x[edges[mine] : edges[mine + distance]]
        give = x[edges[theirs] : edges[theirs + distance]]
        partner = folding.rank_of(place ^ distance)
        summand = inbox[: keep.numel()]
        rotated.sendrecv(give, partner, summand, partner)
        rotated.accumulate_(keep, summand, op)
        distance //= 2
    distance = 1
    while distance < folding.core:  # the upper of two partners hands over all it has, and is done
        theirs = (place ^ distance) & -distance
        partner = folding.rank_of(place ^ distance)
        if place & distance:
            rotated.send(x[edges[place] : edges[place + distance]], partner)
            break
        rotated.recv(x[edges[theirs] : edges[theirs + distance]], partner)
        distance *= 2
    return x
