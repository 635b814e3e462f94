"""Scatter: the root hands every rank its part."""

from __future__ import annotations

from typing import Any

import torch

from dtlab.collectives.call import call_for
from dtlab.collectives.registry import (
    Rows,
    algorithm,
    check_at_root,
    check_parts,
    check_root,
    check_tensor,
    flattened,
    rows_of,
    write_back,
)
from dtlab.comm import Comm, Send
from dtlab.cost.model import lg_ceil
from dtlab.cost.tree import subtree_size


def scatter(
    comm: Comm, parts: torch.Tensor | None, x: torch.Tensor, root: int = 0,
    algorithm: str = "binomial", **options: Any
) -> torch.Tensor:
    """In place in `x`. Before: the root holds `parts`, of shape (p, *x.shape); others pass None.
    After: rank r's x is parts[r]. Returns `x`.

    Shapes and dtypes are equal everywhere, else `ShapeMismatch`. Chapter: 04.
    """
    run, inner = call_for(comm, "scatter", algorithm, options, x, comm.size, root=root)
    check_root(comm, root, "scatter")
    check_at_root(comm, root, parts, "the parts of scatter")
    rows = None
    if comm.rank == root:
        check_tensor(comm, parts, "scatter", writes=False)
        assert parts is not None
        check_parts(comm, parts, "scatter", like=x)
        rows = rows_of(parts)
    vector = flattened(x)
    run(inner, rows, vector, root)
    return write_back(x, vector)


@algorithm("scatter", "linear")
def linear(comm: Comm, rows: Rows | None, x: torch.Tensor, root: int = 0) -> torch.Tensor:
    """Fill `x`: the root sends each rank its row, one after the other.

    Cost: (p−1)α + (p−1)/p·nβ, n bytes in all rows together.
    """
    if rows is None:
        comm.recv(x, root)
        return x
    for distance in range(1, comm.size):
        target = (root + distance) % comm.size
        comm.send(rows[target], target)
    return x.copy_(rows[root])


@algorithm("scatter", "linear_nonblocking")
def linear_nonblocking(
    comm: Comm, rows: Rows | None, x: torch.Tensor, root: int = 0
) -> torch.Tensor:
    """Fill `x`: the root posts all its sends together; one starts while others are under way.

    Cost, b = n/p: α + bβ + (p−2)·max(α, bβ).
    """
    if rows is None:
        comm.recv(x, root)
        return x
    targets = [(root + distance) % comm.size for distance in range(1, comm.size)]
    comm.exchange(*(Send(rows[target], target) for target in targets))
    return x.copy_(rows[root])


@algorithm("scatter", "binomial")
def binomial(
    comm: Comm, rows: torch.Tensor | None, x: torch.Tensor, root: int = 0
) -> torch.Tensor:
    """Fill `x`: down a binomial tree, each rank receives the rows of its whole subtree.

    The tree is that of `gather`. The farthest child comes first, for it is the root of the deepest
    subtree, unless p cuts that off. Cost: ⌈lg p⌉α + (p−1)/p·nβ. Memory on the way: the
    rows of the subtree.
    """
    p = comm.size
    me = (comm.rank - root) % p
    size = subtree_size(me, p)
    if rows is None:
        held = x.new_empty((size, *x.shape))  # held[i]: for the rank me + i
        comm.recv(held, ((me & me - 1) + root) % p)
    else:
        held = rows.roll(-root, dims=0) if root else rows
    bit = 1 << lg_ceil(size)
    while bit > 1:
        bit //= 2
        comm.send(held[bit : 2 * bit], (me + bit + root) % p)
    return x.copy_(held[0])  # last, for at the root x may be one of its rows
