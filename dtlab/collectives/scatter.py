"""Scatter: the root hands every rank its part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtlab.collectives.call import call_for
from dtlab.collectives.registry import (
    algorithm,
    check_parts,
    check_root,
    check_tensor,
    flattened,
    write_back,
)
from dtlab.collectives.tree import subtree
from dtlab.comm import Comm, Send
from dtlab.relay import in_turn, others


def scatter(
    comm: Comm, parts: torch.Tensor | None, x: torch.Tensor, root: int = 0,
    algorithm: str = "binomial", **options: Any
) -> torch.Tensor:
    """In place in `x`. Before: the root holds `parts`, of shape (p, *x.shape); others pass None.
    After: rank r's x is parts[r]. Returns `x`.

    Shapes and dtypes are equal everywhere, else `ShapeMismatch`. Chapter: 04.
    """
    call = call_for(comm, "scatter", algorithm, options, x, comm.size, root=root)
    check_root(comm, root, "scatter")
    rows = None
    if comm.rank == root:
        check_tensor(comm, parts, "scatter")
        assert parts is not None
        check_parts(comm, parts, "scatter", like=x)
        rows = parts.detach().reshape(comm.size, -1)
    vector = flattened(x)
    call(comm, rows, vector, root)
    return write_back(x, vector)


@algorithm("scatter", "linear")
def linear(
    comm: Comm, rows: torch.Tensor | Sequence[torch.Tensor] | None, x: torch.Tensor, root: int = 0
) -> torch.Tensor:
    """Fill `x`: the root sends each rank its row, one after the other.

    Cost: (p−1)α + (p−1)/p·nβ, n bytes in all rows together.
    """
    if rows is None:
        comm.recv(x, root)
        return x
    in_turn(comm, *(Send(rows[rank], rank) for rank in others(root, range(comm.size))))
    return x.copy_(rows[root])


@algorithm("scatter", "binomial")
def binomial(
    comm: Comm, rows: torch.Tensor | None, x: torch.Tensor, root: int = 0
) -> torch.Tensor:
    """Fill `x`: down a binomial tree, each rank receives the rows of its whole subtree.

    Cost: ⌈lg p⌉α + (p−1)/p·nβ. Memory on the way: the rows of the subtree.
    """
    p = comm.size
    parent, children, size = subtree((comm.rank - root) % p, p)
    if rows is None:
        held = x.new_empty((size, *x.shape))
        comm.recv(held, (parent + root) % p)
    else:
        held = rows.roll(-root, dims=0) if root else rows  # held[i] is for the rank root + i
    x.copy_(held[0])
    for child, first, after in children:
        comm.send(held[first:after], (child + root) % p)
    return x
