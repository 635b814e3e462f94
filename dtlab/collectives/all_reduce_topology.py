"""All-reduce made for a topology: machines, grids, rings given from outside.

In the registry of `all_reduce`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtlab.checks import is_whole
from dtlab.collectives.all_gather import ring as all_gather
from dtlab.collectives.all_reduce import ring as all_reduce
from dtlab.collectives.reduce_scatter import ring as reduce_scatter
from dtlab.collectives.registry import algorithm, cut
from dtlab.comm import Comm, Recv, Send
from dtlab.cost.model import best_divisor
from dtlab.errors import ConfigError
from dtlab.reduction import Op


@algorithm("all_reduce", "hierarchical")
def hierarchical(
    comm: Comm, x: torch.Tensor, op: Op = "sum", group: int | None = None
) -> torch.Tensor:
    """In place: reduce to a leader in each group of k ranks, ring over the leaders, hand out.

    Groups are k = `group` neighbours (say, the GPUs of one machine; default: the divisor of p
    closest to √p). Only leaders talk to other groups: p/k ranks on the slow links, not p.
    Cost: 4(k−1) + 2(p/k−1) rounds; leaders carry all n bytes.
    Source: Jia et al. 2018, "Highly scalable deep learning training system", §3.3.
    """
    p, me = comm.size, comm.rank
    k = best_divisor(p) if group is None else group
    if not _is_count(k) or p % k:
        raise ConfigError(f"hierarchical: {p} ranks don't form groups of {k!r}; "
                          f"choose a divisor of {p}")
    team = comm.subgroup(range(me - me % k, me - me % k + k))
    chunks = cut(x, k)
    reduce_scatter(team, chunks, op)  # rank r of the team now has chunk r
    if team.rank:
        team.send(chunks[team.rank], 0)
        team.recv(chunks[team.rank], 0)
    else:
        for member in range(1, k):
            team.recv(chunks[member], member)
        all_reduce(comm.subgroup(range(0, p, k)), x, op)
        for member in range(1, k):
            team.send(chunks[member], member)
    all_gather(team, chunks)
    return x


@algorithm("all_reduce", "torus")
def torus(
    comm: Comm, x: torch.Tensor, op: Op = "sum", shape: tuple[int, int] | None = None
) -> torch.Tensor:
    """In place, on a grid of X columns and Y rows, rank = X·row + column: reduce-scatter along the
    rows, all-reduce that X-th part along the columns, all-gather along the rows.

    shape: (X, Y); default: as square as p allows.
    Cost: 2(X−1) + 2(Y−1) rounds, 2(p−1)/p·nβ + (p−1)/p·nγ: the ring's bytes, far fewer rounds.
    Source: Mikami et al. 2018, "Massively distributed SGD", §3.2.
    """
    p, me = comm.size, comm.rank
    columns = _columns(p, shape)
    row = comm.subgroup(range(me - me % columns, me - me % columns + columns))
    column = comm.subgroup(range(me % columns, p, columns))
    chunks = cut(x, columns)
    reduce_scatter(row, chunks, op)  # rank c of the row now has chunk c
    all_reduce(column, chunks[row.rank], op)
    all_gather(row, chunks)
    return x


@algorithm("all_reduce", "two_ring")
def two_ring(
    comm: Comm, x: torch.Tensor, op: Op = "sum", cycles: Sequence[Sequence[int]] | None = None
) -> torch.Tensor:
    """In place: x is shared out among several rings, which all run at the same time.

    cycles: each lists all ranks once, in the order of a ring; rings that share no link double the
    bandwidth. A cycle named twice carries twice as much (for links that are doubled). Default:
    once forwards, once backwards.
    Cost of two rings on one port a rank: at most 4(p−1)α + 2(p−1)/p·nβ + (p−1)/p·nγ; half the β
    term where the rings have links of their own.
    Source: NCCL; Wang et al. 2020, Blink.
    """
    p = comm.size
    rings = [comm.subgroup(cycle) for cycle in _cycles(p, cycles)]
    shares = [cut(share, p) for share in cut(x, len(rings))]
    inboxes = [torch.empty_like(chunks[0]) for chunks in shares]
    for step in range(2 * (p - 1)):
        works, sums = [], []
        for ring, chunks, inbox in zip(rings, shares, inboxes, strict=True):
            me, right, left = ring.rank, (ring.rank + 1) % p, (ring.rank - 1) % p
            leaving, staying = chunks[(me - step) % p], chunks[(me - step - 1) % p]
            arriving = staying
            if step < p - 1:  # reduce-scatter; then all-gather
                arriving = inbox[: staying.numel()]
                sums.append((staying, arriving))
            works += ring.post(Send(leaving, right), Recv(arriving, left))
        for work in works:
            work.wait()
        for staying, arriving in sums:
            comm.accumulate_(staying, arriving, op)
    return x


def _is_count(value: object) -> bool:
    """Is it a whole number, 1 or more?"""
    return is_whole(value) and int(value) >= 1


def _columns(p: int, shape: tuple[int, int] | None) -> int:
    """Count the columns of a grid of p ranks. Raises `ConfigError` unless `shape` makes p."""
    if shape is None:
        return p // best_divisor(p)
    if not (isinstance(shape, Sequence) and len(shape) == 2 and all(map(_is_count, shape))):
        raise ConfigError(f"torus: shape is (columns, rows), two whole numbers, not {shape!r}")
    columns, rows = shape
    if columns * rows != p:
        raise ConfigError(f"torus: a grid of {columns} × {rows} doesn't fit {p} ranks; choose two "
                          f"numbers whose product is {p}")
    return columns


def _cycles(p: int, cycles: Sequence[Sequence[int]] | None) -> Sequence[Sequence[int]]:
    """The cycles. Raises `ConfigError` unless each holds all p ranks once."""
    if cycles is None:
        return [range(p), range(p)[::-1]]
    if not isinstance(cycles, Sequence) or not cycles:
        raise ConfigError(f"two_ring needs at least one cycle, a list of all ranks, not {cycles!r}")
    for cycle in cycles:
        if not isinstance(cycle, Sequence) or sorted(cycle) != list(range(p)):
            raise ConfigError(f"two_ring: {cycle!r} is no cycle over the ranks 0 to {p - 1}: each "
                              f"must occur exactly once")
    return cycles
