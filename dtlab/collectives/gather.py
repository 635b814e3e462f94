"""Gather: the root gets what every rank holds, in order of the ranks."""

from __future__ import annotations

from typing import Any

import torch

from dtlab.collectives.call import call_for
from dtlab.collectives.registry import (
    algorithm,
    check_root,
    flattened,
    room_for,
)
from dtlab.collectives.tree import subtree
from dtlab.comm import Comm, Recv
from dtlab.relay import in_turn


def gather(
    comm: Comm, x: torch.Tensor, root: int = 0, algorithm: str = "binomial",
    out: torch.Tensor | None = None, **options: Any,
) -> torch.Tensor | None:
    """Before: rank r holds x_r. Returns, at the root, [x_0, x_1, …] of shape (p, *x.shape): in
    `out`, if given, else in a new tensor; None elsewhere.

    Shapes and dtypes are equal everywhere, else `ShapeMismatch`. Chapter: 04.
    """
    call = call_for(comm, "gather", algorithm, options, x, comm.size, root=root)
    check_root(comm, root, "gather")
    result = rows = None
    if comm.rank == root:
        result = room_for(comm, out, (comm.size, *x.shape), x, "gather")
        rows = result.view(comm.size, x.numel())
        rows[root] = x.detach().reshape(-1)
    call(comm, flattened(x), rows, root)
    return result


@algorithm("gather", "linear")
def linear(comm: Comm, x: torch.Tensor, rows: torch.Tensor | None, root: int = 0) -> None:
    """Fill `rows` at the root, which receives from one rank after the other.

    Cost: (p−1)α + (p−1)/p·nβ, n bytes in all rows together.
    """
    if rows is None:
        comm.send(x, root)
        return
    ranks = [(root + distance) % comm.size for distance in range(1, comm.size)]
    in_turn(comm, *(Recv(rows[rank], rank) for rank in ranks))


@algorithm("gather", "binomial")
def binomial(comm: Comm, x: torch.Tensor, rows: torch.Tensor | None, root: int = 0) -> None:
    """Fill `rows` at the root: up a binomial tree, each rank sends the rows of its whole subtree.

    Cost: ⌈lg p⌉α + (p−1)/p·nβ. Memory on the way: the rows of the subtree.
    """
    p = comm.size
    me = (comm.rank - root) % p
    parent, children, size = subtree(me, p)
    # held[i]: of the rank me + i
    held = x.new_empty((size, *x.shape)) if rows is None or root else rows
    held[0] = x
    in_turn(comm, *(Recv(held[first:after], (child + root) % p)
                    for child, first, after in reversed(children)))
    if rows is None:
        comm.send(held, (parent + root) % p)
    elif root:
        rows[root:], rows[:root] = held[: p - root], held[p - root :]
