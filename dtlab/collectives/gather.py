"""Gather: the root gets what every rank holds, in order of the ranks."""

from __future__ import annotations

from typing import Any

import torch

from dtlab.collectives.call import call_for
from dtlab.collectives.registry import Rows, algorithm, check_root, detached, flattened, output_for
from dtlab.comm import Comm, Recv
from dtlab.cost.tree import subtree_size


def gather(
    comm: Comm, x: torch.Tensor, root: int = 0, algorithm: str = "binomial",
    out: torch.Tensor | None = None, **options: Any,
) -> torch.Tensor | None:
    """Before: rank r holds x_r. Returns, at the root, [x_0, x_1, …] of shape (p, *x.shape): in
    `out`, if given, else in a new tensor; None elsewhere, where `out` does not count.

    Shapes and dtypes are equal everywhere, else `ShapeMismatch`. Chapter: 04.
    """
    run, inner = call_for(comm, "gather", algorithm, options, x, comm.size, writes=False, root=root)
    check_root(comm, root, "gather")
    result = rows = None
    if comm.rank == root:
        result = output_for(comm, out, (comm.size, *x.shape), x, "gather")
        rows = detached(result).view(comm.size, x.numel())
        rows[root] = x.detach().reshape(-1)
    run(inner, flattened(x), rows, root)
    return result


@algorithm("gather", "linear")
def linear(comm: Comm, x: torch.Tensor, rows: Rows | None, root: int = 0) -> None:
    """Fill `rows` at the root, which receives from one rank after the other.

    Cost: (p−1)α + (p−1)/p·nβ, n bytes in all rows together.
    """
    if rows is None:
        comm.send(x, root)
        return
    for distance in range(1, comm.size):
        source = (root + distance) % comm.size
        comm.recv(rows[source], source)


@algorithm("gather", "linear_nonblocking")
def linear_nonblocking(
    comm: Comm, x: torch.Tensor, rows: Rows | None, root: int = 0
) -> None:
    """Fill `rows` at the root, which posts all receives together: each row comes when it can.

    Cost, b = n/p: at most α + bβ + (p−2)·max(α, bβ): one port takes the messages one after the
    other. Where receiving has no overhead, as in the simulator, α + (p−1)bβ.
    """
    if rows is None:
        comm.send(x, root)
        return
    sources = [(root + distance) % comm.size for distance in range(1, comm.size)]
    comm.exchange(*(Recv(rows[source], source) for source in sources))


@algorithm("gather", "binomial")
def binomial(comm: Comm, x: torch.Tensor, rows: torch.Tensor | None, root: int = 0) -> None:
    """Fill `rows` at the root: up a binomial tree, each rank sends the rows of its whole subtree.

    Ranks are renumbered so that the root is 0. A rank's children are its number with one bit set
    below its lowest one-bit; its subtree is the `size` ranks from it on. The nearest child comes
    first, for it has the smallest subtree to wait for.
    Cost: ⌈lg p⌉α + (p−1)/p·nβ. Memory on the way: the rows of the subtree.
    """
    p = comm.size
    me = (comm.rank - root) % p
    size = subtree_size(me, p)
    held = x.new_empty((size, *x.shape)) if rows is None or root else rows
    held[0] = x  # held[i]: of the rank me + i
    bit = 1
    while bit < size:
        comm.recv(held[bit : 2 * bit], (me + bit + root) % p)
        bit *= 2
    if rows is None:
        comm.send(held, ((me & me - 1) + root) % p)  # to the rank without my lowest one-bit
    elif root:
        rows[root:], rows[:root] = held[: p - root], held[p - root :]
