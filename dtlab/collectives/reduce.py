"""Reduce: the root gets the sum (or product, …) of what all ranks hold."""

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
from dtlab.reduction import Op, check_op, finish_average_


def reduce(
    comm: Comm, x: torch.Tensor, root: int = 0, op: Op = "sum", algorithm: str = "binomial"
) -> torch.Tensor:
    """In place at the root. Before: rank r holds x_r. After: the root holds x_0 op x_1 op …

    Other ranks keep their x. Returns `x`. Shapes and dtypes are equal everywhere, else
    `ShapeMismatch`; `op` as in `Comm.accumulate_`. Chapter: 04.
    """
    run = choose("reduce", algorithm)
    check_tensor(comm, x, "reduce")
    check_root(comm, root, "reduce")
    check_op(op, x.dtype)
    vector = flattened(x) if comm.rank == root else flattened(x).clone()
    with comm.labelled(signature("reduce", x, algorithm=algorithm, op=op, root=root)):
        run(comm, vector, root, op)
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
    inbox = x.new_empty(x.shape)
    for distance in range(1, comm.size):
        comm.recv(inbox, (root + distance) % comm.size)
        comm.accumulate_(x, inbox, op)
    return x


@algorithm("reduce", "binomial")
def binomial(comm: Comm, x: torch.Tensor, root: int = 0, op: Op = "sum") -> torch.Tensor:
    """In place at the root (and, with partial sums, on the way): the broadcast's tree, upwards.

    In round k, ranks whose k-th bit is the lowest that is set hand their sum to their parent.

    Cost: ⌈lg p⌉(α + nβ + nγ). Source: Thakur, Rabenseifner, Gropp 2005, §4.5.
    """
    p = comm.size
    me = (comm.rank - root) % p
    inbox = x.new_empty(x.shape) if not me & 1 else x  # odd ranks are leaves: they only send
    bit = 1
    while bit < p and not me & bit:
        if me + bit < p:
            comm.recv(inbox, (me + bit + root) % p)
            comm.accumulate_(x, inbox, op)
        bit *= 2
    if me:
        comm.send(x, (me - bit + root) % p)
    return x
