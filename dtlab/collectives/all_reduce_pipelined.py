"""All-reduce round a ring, in pieces: adding hides behind sending. In the registry of `all_reduce`.
"""

from __future__ import annotations

from collections import deque

import torch

from dtlab.collectives.all_reduce import ring
from dtlab.collectives.registry import algorithm, cut
from dtlab.comm import Comm, Work
from dtlab.reduction import Op


@algorithm("all_reduce", "pipelined_ring")
def pipelined_ring(
    comm: Comm, x: torch.Tensor, op: Op = "sum", piece_bytes: int = 1 << 20, window: int = 3
) -> torch.Tensor:
    """In place: the ring, but each chunk travels in k pieces of at most `piece_bytes`, and a piece
    leaves as soon as it has been added to, while the next ones come in.

    `window` receives are posted ahead, so that a piece need not wait until its receiver is ready.
    Memory: `window` pieces. Cost, s bytes in a piece and N = 2(p−1)k pieces: at most
    α + sβ + (N−1)·max(α, sβ) + Nsγ/2; if sγ ≤ max(α, sβ), all but the last sγ is hidden.
    One piece a chunk: the ring itself.
    Source: Open MPI, coll/base, "ring segmented"; here the second half is pipelined, too.
    """
    p, me = comm.size, comm.rank
    right, left = (me + 1) % p, (me - 1) % p
    chunks = cut(x, p)
    k = -(-chunks[0].nbytes // piece_bytes)
    if k < 2 or p == 1:
        return ring(comm, x, op)
    pieces = [cut(chunk, k) for chunk in chunks]
    # In the order in which they pass this rank: its own chunk, then what comes from the left.
    passing = [piece for step in range(2 * p - 1) for piece in pieces[(me - step) % p]]
    own, coming = passing[:k], passing[k:]
    summands = len(coming) // 2  # so many are added; the others come complete
    inboxes = torch.empty_like(x[: window * pieces[0][0].numel()]).chunk(window)

    def receive(turn: int) -> tuple[Work, torch.Tensor]:
        piece = coming[turn]
        into = inboxes[turn % window][: piece.numel()] if turn < summands else piece
        return comm.irecv(into, left), into

    sends = [comm.isend(piece, right) for piece in own]
    arriving = deque(receive(turn) for turn in range(min(window, len(coming))))
    for turn, piece in enumerate(coming):
        work, arrived = arriving.popleft()
        work.wait()
        if turn < summands:
            comm.accumulate_(piece, arrived, op)
        if turn < len(coming) - k:
            sends.append(comm.isend(piece, right))
        if turn + window < len(coming):
            arriving.append(receive(turn + window))
    for work in sends:
        work.wait()
    return x
