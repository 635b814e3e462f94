"""Scans: rank r gets the sum over the ranks up to it (scan), or before it (exclusive scan).

Operations need not commute: the operand of the lower ranks stands on the left.
"""

from __future__ import annotations

from typing import Any

import torch

from dtlab.collectives.call import call_for
from dtlab.collectives.registry import algorithm, flattened, write_back
from dtlab.comm import Comm, Recv, Send
from dtlab.reduction import Op, check_op, finish_average_, identity, swapped


def scan(comm: Comm, x: torch.Tensor, op: Op = "sum",
         algorithm: str = "recursive_doubling", **options: Any) -> torch.Tensor:
    """In place. Before: rank r holds x_r. After: it holds x_0 op x_1 op … op x_r. Returns `x`.

    With op "avg", rank r has the mean of r + 1 values; a function must be associative, and is given
    pieces of vectors. Shapes and dtypes are equal everywhere,
    else `ShapeMismatch`. Chapter: 04b.
    """
    run, inner = call_for(comm, "scan", algorithm, options, x, op=op)
    check_op(op, x.dtype)
    vector = flattened(x)
    run(inner, vector, op)
    return write_back(x, finish_average_(vector, op, comm.rank + 1))


def exscan(comm: Comm, x: torch.Tensor, op: Op = "sum",
           algorithm: str = "recursive_doubling", **options: Any) -> torch.Tensor:
    """In place. Before: rank r holds x_r. After: it holds x_0 op … op x_(r−1). Returns `x`.

    Rank 0 gets what changes nothing under `op` (0 for sum and avg, 1 for prod, …); if `op` is a
    function, it keeps its x. All else as `scan`. Chapter: 04b.
    """
    run, inner = call_for(comm, "exscan", algorithm, options, x, op=op)
    check_op(op, x.dtype)
    vector = flattened(x)
    run(inner, vector, op)
    if comm.rank == 0:
        identity(vector, op)
    return write_back(x, finish_average_(vector, op, max(comm.rank, 1)))


@algorithm("scan", "linear")
def linear(comm: Comm, x: torch.Tensor, op: Op = "sum") -> torch.Tensor:
    """In place: receive the sum of those before, add yourself, hand it on.

    Cost: (p−1)(α + nβ + nγ).
    """
    if comm.rank:
        before = torch.empty_like(x)
        comm.recv(before, comm.rank - 1)
        comm.accumulate_(x, before, swapped(op))
    if comm.rank + 1 < comm.size:
        comm.send(x, comm.rank + 1)
    return x


@algorithm("scan", "recursive_doubling")
def recursive_doubling(comm: Comm, x: torch.Tensor, op: Op = "sum") -> torch.Tensor:
    """In place: after round k, x is the sum over the 2^(k+1) ranks that end with mine.

    Cost: ⌈lg p⌉(α + nβ + nγ). Source: Hillis & Steele 1986.
    """
    before = torch.empty_like(x)
    distance = 1
    while distance < comm.size:
        _pass_on(comm, x, before, distance)
        if comm.rank >= distance:
            comm.accumulate_(x, before, swapped(op))
        distance *= 2
    return x


@algorithm("exscan", "linear")
def exclusive_linear(comm: Comm, x: torch.Tensor, op: Op = "sum") -> torch.Tensor:
    """In place (rank 0 keeps its x): as `linear`, but keep what you received.

    Cost: (p−1)(α + nβ) + (p−2)nγ: the last rank has nothing to add.
    """
    me, last = comm.rank, comm.size - 1
    mine = x.clone()
    if me:
        comm.recv(x, me - 1)
        if me < last:
            comm.accumulate_(mine, x, swapped(op))
    if me < last:
        comm.send(mine, me + 1)
    return x


@algorithm("exscan", "recursive_doubling")
def exclusive_recursive_doubling(comm: Comm, x: torch.Tensor, op: Op = "sum") -> torch.Tensor:
    """In place (rank 0 keeps its x): as `recursive_doubling`, with a second sum without mine.

    Cost: ⌈lg p⌉(α + nβ) + 2(⌈lg p⌉ − 1)nγ.
    """
    running, before = x.clone(), torch.empty_like(x)  # `running` includes mine
    distance = 1
    while distance < comm.size:
        _pass_on(comm, running, before, distance)
        if comm.rank >= distance:
            if distance == 1:
                x.copy_(before)
            else:
                comm.accumulate_(x, before, swapped(op))
            if 2 * distance < comm.size:
                comm.accumulate_(running, before, swapped(op))
        distance *= 2
    return x


def _pass_on(comm: Comm, sums: torch.Tensor, before: torch.Tensor, distance: int) -> None:
    """Send `sums` `distance` ranks ahead, and receive `before` from as far back."""
    ops: list[Send | Recv] = []
    if comm.rank >= distance:
        ops.append(Recv(before, comm.rank - distance))
    if comm.rank + distance < comm.size:
        ops.append(Send(sums, comm.rank + distance))
    comm.exchange(*ops)
