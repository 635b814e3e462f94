"""All-reduce round a ring, in segments: adding hides behind sending. In `all_reduce`'s registry."""

from __future__ import annotations

import torch

from dtlab.collectives.all_reduce import ring
from dtlab.collectives.registry import algorithm, cut
from dtlab.collectives.ring import all_gather_
from dtlab.comm import Comm, Recv, Send, Work
from dtlab.reduction import Op


@algorithm("all_reduce", "segmented_ring")
def segmented_ring(
    comm: Comm, x: torch.Tensor, op: Op = "sum", segment_bytes: int = 1 << 20
) -> torch.Tensor:
    """In place: the ring, but each chunk travels in k segments of at most `segment_bytes`.

    In the first half, the next segment is on its way while the last one is added: a step need not
    wait for the whole of the step before it. The second half adds nothing and stays as it was.
    Memory: two segments. Cost, if adding is no slower than sending (sγ ≤ α + sβ, s = n/pk bytes in
    a segment): (p−1)(k+1)α + 2(p−1)/p·nβ + sγ, where the ring has (p−1)/p·nγ. One segment: the
    ring itself. Source: Open MPI, coll/base, "ring segmented".
    """
    p, me = comm.size, comm.rank
    right, left = (me + 1) % p, (me - 1) % p
    chunks = cut(x, p)
    k = -(-chunks[0].nbytes // segment_bytes)
    if k < 2 or p == 1:
        return ring(comm, x, op)
    segments = [cut(chunk, k) for chunk in chunks]
    inboxes = torch.empty_like(x[: 2 * segments[0][0].numel()]).chunk(2)
    tour = [(step, i) for step in range(p - 1) for i in range(k)]

    def summand(turn: int) -> torch.Tensor:
        return inboxes[turn % 2][: staying(turn).numel()]

    def staying(turn: int) -> torch.Tensor:
        step, i = tour[turn]
        return segments[(me - step - 1) % p][i]

    def start(turn: int) -> list[Work]:
        step, i = tour[turn]  # what leaves now has got its summand k turns ago
        return comm.post(Send(segments[(me - step) % p][i], right), Recv(summand(turn), left))

    under_way = start(0)
    for turn in range(len(tour)):
        for work in under_way:
            work.wait()
        under_way = start(turn + 1) if turn + 1 < len(tour) else []
        comm.accumulate_(staying(turn), summand(turn), op)
    all_gather_(comm, chunks)
    return x
