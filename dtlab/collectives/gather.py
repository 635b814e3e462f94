"""Gather: the root gets what every rank holds, in order of the ranks."""

from __future__ import annotations

from typing import Any

import torch

from dtlab.collectives.auto import named
from dtlab.collectives.registry import (
    algorithm,
    check_root,
    check_tensor,
    choose,
    flattened,
    signature,
)
from dtlab.collectives.tree import subtree
from dtlab.comm import Comm


def gather(
    comm: Comm, x: torch.Tensor, root: int = 0, algorithm: str = "binomial", **options: Any
) -> torch.Tensor | None:
    """Before: rank r holds x_r. Returns, at the root, [x_0, x_1, …] of shape (p, *x.shape); None
    elsewhere.

    Shapes and dtypes are equal everywhere, else `ShapeMismatch`. Chapter: 04.
    """
    algorithm = named(comm, "gather", algorithm, x, pieces=comm.size)
    run = choose("gather", algorithm, options)
    check_root(comm, root, "gather")
    check_tensor(comm, x, "gather")
    with comm.labelled(signature("gather", x, algorithm=algorithm, **options, root=root)):
        rows: torch.Tensor | None = run(comm, flattened(x), root)
    return None if rows is None else rows.view(comm.size, *x.shape)


@algorithm("gather", "linear")
def linear(comm: Comm, x: torch.Tensor, root: int = 0) -> torch.Tensor | None:
    """Rows at the root, which receives from one rank after the other.

    Cost: (p−1)α + (p−1)/p·nβ, n bytes in all rows together.
    """
    if comm.rank != root:
        comm.send(x, root)
        return None
    rows = x.new_empty((comm.size, x.numel()))
    rows[root] = x
    for distance in range(1, comm.size):
        rank = (root + distance) % comm.size
        comm.recv(rows[rank], rank)
    return rows


@algorithm("gather", "binomial")
def binomial(comm: Comm, x: torch.Tensor, root: int = 0) -> torch.Tensor | None:
    """Rows at the root: up a binomial tree, each rank sends the rows of its whole subtree.

    Cost: ⌈lg p⌉α + (p−1)/p·nβ. Memory on the way: the rows of the subtree.
    """
    p = comm.size
    me = (comm.rank - root) % p
    parent, children, size = subtree(me, p)
    held = x.new_empty((size, x.numel()))  # held[i] is of the rank i further on than me
    held[0] = x
    for child, first, after in reversed(children):
        comm.recv(held[first:after], (child + root) % p)
    if me:
        comm.send(held, (parent + root) % p)
        return None
    return held.roll(root, dims=0) if root else held
