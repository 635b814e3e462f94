"""Collectives whose parts differ in size from rank to rank: what MPI calls scatterv, gatherv, ….

Each rank says what it sends and gives the tensors to receive into; sizes may be zero. Ranks that
don't know each other's sizes first exchange those, with `all_gather` or `all_to_all`. Parts are of
one dtype. Cost: b_r is the size of rank r's part in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtlab.checks import short
from dtlab.collectives.all_gather import ring as all_gather
from dtlab.collectives.all_to_all import pairwise
from dtlab.collectives.gather import linear as gather
from dtlab.collectives.reduce_scatter import pairwise as pairwise_sums
from dtlab.collectives.registry import (
    check_at_root,
    check_comm,
    check_root,
    check_tensor,
    flattened,
    write_back,
)
from dtlab.collectives.scatter import linear as scatter
from dtlab.comm import Comm
from dtlab.errors import ShapeMismatch
from dtlab.reduction import Op, check_op, finish_average_, named_op

Parts = Sequence[torch.Tensor]


def scatterv(comm: Comm, parts: Parts | None, x: torch.Tensor, root: int = 0) -> torch.Tensor:
    """In place in `x`. Before: the root holds p `parts`; others pass None. After: rank r's x is
    parts[r], which has its shape. Returns `x`. Cost: Σ(α + b_r β) over all ranks but the root.
    """
    check_comm(comm, "scatterv(comm, …)")
    check_root(comm, root, "scatterv")
    check_at_root(comm, root, parts, "the parts of scatterv")
    check_tensor(comm, x, "scatterv")
    rows = None
    if comm.rank == root:
        rows = _vectors(comm, parts, "scatterv", writes=False)
        _check_like(comm, rows[root], x, "scatterv")
    vector = flattened(x)
    scatter(comm.collective(_label("scatterv", x, root=root)), rows, vector, root)
    return write_back(x, vector)


def gatherv(comm: Comm, x: torch.Tensor, into: Parts | None, root: int = 0) -> Parts | None:
    """In place in `into`: p tensors at the root, None elsewhere. Before: rank r holds x_r. After:
    into[r] is x_r, whose shape it has. Returns `into`. Cost: Σ(α + b_r β), less the root's own.
    """
    check_comm(comm, "gatherv(comm, …)")
    check_root(comm, root, "gatherv")
    check_at_root(comm, root, into, "the tensors of gatherv")
    check_tensor(comm, x, "gatherv", writes=False)
    vector, rows = flattened(x), None
    if comm.rank == root:
        rows = _vectors(comm, into, "gatherv")
        _check_apart(comm, rows, [], "gatherv")
        _check_like(comm, rows[root], x, "gatherv")
        rows[root].copy_(vector)
    gather(comm.collective(_label("gatherv", x, root=root)), vector, rows, root)
    if into is None or rows is None:
        return None
    return _written(into, rows)


def all_gatherv(comm: Comm, x: torch.Tensor, into: Parts) -> Parts:
    """In place in `into`: p tensors. Before: rank r holds x_r. After: into[r] is x_r, everywhere.

    Every part goes once round the ring. Returns `into`. Cost: at most (p−1)(α + max b_r β).
    """
    check_comm(comm, "all_gatherv(comm, …)")
    check_tensor(comm, x, "all_gatherv", writes=False)
    rows = _vectors(comm, into, "all_gatherv")
    _check_apart(comm, rows, [], "all_gatherv")
    _check_like(comm, rows[comm.rank], x, "all_gatherv")
    rows[comm.rank].copy_(flattened(x))
    all_gather(comm.collective(_label("all_gatherv", x)), rows)
    return _written(into, rows)


def all_to_allv(comm: Comm, parts: Parts, into: Parts) -> Parts:
    """In place in `into`. Before: rank r holds p `parts`. After: its into[s] is rank s's parts[r],
    whose shape it has. Returns `into`.

    In step k every rank sends to the one k further on. Cost: at most (p−1)(α + max b β). Experts of
    a mixture get their tokens so. Chapter: 04b.
    """
    check_comm(comm, "all_to_allv(comm, …)")
    rows = _vectors(comm, parts, "all_to_allv", writes=False)
    received = _vectors(comm, into, "all_to_allv")
    _check_like(comm, received[comm.rank], rows[comm.rank], "all_to_allv")
    _check_apart(comm, received, rows, "all_to_allv")
    pairwise(comm.collective(_label("all_to_allv", rows[0])), rows, received)
    return _written(into, received)


def reduce_scatterv(comm: Comm, parts: Parts, op: Op = "sum") -> torch.Tensor:
    """Before: each rank holds p `parts`; all ranks' parts[r] have one size. After: rank r has the
    reduction of all ranks' parts[r], which is returned. MPI calls it MPI_Reduce_scatter.

    Cost: at most (p−1)(α + max b_r (β + γ)).
    """
    check_comm(comm, "reduce_scatterv(comm, …)")
    op = named_op(op)
    rows = [row.clone() for row in _vectors(comm, parts, "reduce_scatterv", writes=False)]
    check_op(op, rows[0].dtype)
    label = _label("reduce_scatterv", rows[0], op=getattr(op, "__name__", op))
    pairwise_sums(comm.collective(label), rows, op)
    return finish_average_(rows[comm.rank].view(parts[comm.rank].shape), op, comm.size)


def _label(collective: str, x: torch.Tensor, **arguments: object) -> str:
    """The label of a call, as that of `call.call_for`, but without the shapes, which differ."""
    details = [f"{name}={value}" for name, value in arguments.items()]
    return f"{collective}({', '.join([str(x.dtype).removeprefix('torch.'), *details])})"


def _vectors(
    comm: Comm, parts: Parts | None, collective: str, writes: bool = True
) -> list[torch.Tensor]:
    """The parts as vectors. Raises unless they are p tensors of one dtype."""
    listed = isinstance(parts, (Sequence, torch.Tensor))
    if parts is None or not listed or len(parts) != comm.size:
        got = len(parts) if parts is not None and listed else f"{short(parts)}, no list"
        raise ShapeMismatch(f"rank {comm.rank}: {collective} needs a tensor for each of the "
                            f"{comm.size} ranks; got {got}")
    for part in parts:
        check_tensor(comm, part, collective, writes)
        if part.dtype != parts[0].dtype:
            raise ShapeMismatch(f"rank {comm.rank}: {collective} needs parts of one dtype; got "
                                f"{parts[0].dtype} and {part.dtype}")
    return [flattened(part) for part in parts]


def _check_like(comm: Comm, part: torch.Tensor, x: torch.Tensor, collective: str) -> None:
    """Raise unless the rank's own part has the size and dtype of `x`: no message would tell."""
    if part.numel() != x.numel() or part.dtype != x.dtype:
        raise ShapeMismatch(
            f"rank {comm.rank}: {collective}: its own part is {part.dtype} with {part.numel()} "
            f"elements, x is {x.dtype} with {x.numel()}"
        )


def _check_apart(
    comm: Comm, received: Sequence[torch.Tensor], read: Sequence[torch.Tensor], collective: str
) -> None:
    """Raise if one of the vectors `received` lies in the memory of another, or of one to `read`."""
    def memory(vectors: Sequence[torch.Tensor], written: bool) -> list[tuple[int, int, bool]]:
        return [(x.data_ptr(), x.data_ptr() + x.nbytes, written)
                for x in vectors if x.nbytes and not x.is_meta]

    end = {False: 0, True: 0}  # of what has begun before, read or written
    for start, stop, written in sorted(memory(received, True) + memory(read, False)):
        if start < (max(end.values()) if written else end[True]):
            raise ShapeMismatch(f"rank {comm.rank}: {collective} needs memory of its own for each "
                                f"tensor that it receives into; two of those given share some")
        end[written] = max(end[written], stop)


def _written(into: Parts, rows: list[torch.Tensor]) -> Parts:
    """Return `into`, filled from `rows` where those had to be copies."""
    for part, row in zip(into, rows, strict=True):
        write_back(part, row)
    return into
