"""Rings whose chunks travel in pieces: each leaves as soon as it has been added to, while the next
ones come in. In the registries of `all_reduce`, `reduce_scatter` and `all_gather`.

Cost, s bytes in a piece and N pieces that a rank sends: α + sβ + (N−1)·max(α, sβ), and of the
additions what does not hide behind that: where adding is much faster than sending, one sγ.
Source: Open MPI, coll/base, "ring segmented"; here the second half is pipelined, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from dtlab.collectives.all_gather import ring as all_gather_ring
from dtlab.collectives.all_reduce import ring as all_reduce_ring
from dtlab.collectives.reduce_scatter import ring as reduce_scatter_ring
from dtlab.collectives.registry import Rows, algorithm, cut
from dtlab.comm import Comm, Work
from dtlab.cost.model import PIECE_BYTES
from dtlab.reduction import Op


@algorithm("all_reduce", "pipelined_ring")
def all_reduce(
    comm: Comm, x: torch.Tensor, op: Op = "sum", piece_bytes: int = PIECE_BYTES, window: int = 2
) -> torch.Tensor:
    """In place: the ring in pieces, N = 2(p−1)k if there are k in a chunk. See `pipelined_`."""
    p, me = comm.size, comm.rank
    chunks = cut(x, p)
    k = -(-chunks[0].nbytes // piece_bytes)
    if k < 2 or p == 1:
        return all_reduce_ring(comm, x, op)
    passing = [chunks[(me - step) % p] for step in range(2 * p - 1)]
    pipelined_(comm, passing, k, window, op, summands=p - 1)
    return x


@algorithm("reduce_scatter", "pipelined_ring")
def reduce_scatter(
    comm: Comm, rows: Rows, op: Op = "sum", piece_bytes: int = PIECE_BYTES, window: int = 2
) -> Rows:
    """In place: the ring in pieces, N = (p−1)k if there are k in a row. See `pipelined_`."""
    p, me = comm.size, comm.rank
    k = -(-rows[0].nbytes // piece_bytes)
    if k < 2 or p == 1:
        return reduce_scatter_ring(comm, rows, op)
    passing = [rows[(me - 1 - step) % p] for step in range(p)]
    pipelined_(comm, passing, k, window, op, summands=p - 1)
    return rows


@algorithm("all_gather", "pipelined_ring")
def all_gather(
    comm: Comm, rows: Rows, piece_bytes: int = PIECE_BYTES, window: int = 2
) -> Rows:
    """In place: the ring in pieces, N = (p−1)k if there are k in a row. See `pipelined_`."""
    p, me = comm.size, comm.rank
    k = -(-rows[0].nbytes // piece_bytes)
    if k < 2 or p == 1:
        return all_gather_ring(comm, rows)
    pipelined_(comm, [rows[(me - step) % p] for step in range(p)], k, window)
    return rows


def pipelined_(
    comm: Comm, passing: Sequence[torch.Tensor], k: int, window: int, op: Op = "sum",
    summands: int = 0,
) -> None:
    """In place. `passing`: chunks in the order in which they pass this rank, each in k pieces. The
    first one is its own, and leaves to the right. The others come from the left: `summands` of them
    are added to what lies in their place, those after it replace it; all but the last go on.

    `window` receives are posted ahead, so that a piece need not wait until its receiver is ready.
    Memory: `window` pieces.
    """
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    pieces = [piece for chunk in passing for piece in cut(chunk, k)]
    own, others = pieces[:k], pieces[k:]
    inboxes = passing[0].new_empty((window, max(piece.numel() for piece in pieces)))

    def receive(turn: int) -> tuple[Work, torch.Tensor]:
        into = others[turn]
        if turn < summands * k:
            into = inboxes[turn % window][: into.numel()]
        return comm.irecv(into, left), into

    sends = [comm.isend(piece, right) for piece in own]
    arriving = deque(receive(turn) for turn in range(min(window, len(others))))
    for turn, piece in enumerate(others):
        work, arrived = arriving.popleft()
        work.wait()
        if turn < summands * k:
            comm.accumulate_(piece, arrived, op)
        if turn + k < len(others):
            sends.append(comm.isend(piece, right))
        if turn + window < len(others):
            arriving.append(receive(turn + window))
    for work in sends:
        work.wait()
