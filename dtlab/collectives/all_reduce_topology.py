"""All-reduce that knows the wires: machines, grids, rings given from outside.

In the registry of `all_reduce`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtlab.collectives.all_reduce import ring
from dtlab.collectives.registry import algorithm, cut
from dtlab.collectives.ring import Lap, all_gather_, reduce_scatter_
from dtlab.collectives.view import lines
from dtlab.comm import Comm
from dtlab.cost.model import best_divisor
from dtlab.errors import ConfigError
from dtlab.reduction import Op


@algorithm("all_reduce", "hierarchical")
def hierarchical(
    comm: Comm, x: torch.Tensor, op: Op = "sum", group: int | None = None
) -> torch.Tensor:
    """In place: reduce to a leader in each group of k ranks, ring over the leaders, hand out.

    Groups are k = `group` neighbours (say, the GPUs of one machine; default: the divisor of p
    closest to √p). Only leaders talk to other groups: p/k ranks on the slow wires, not p.
    Cost: 4(k−1) + 2(p/k−1) rounds; leaders carry all n bytes.
    Source: Jia et al. 2018, "Highly scalable deep learning training system", §3.3.
    """
    k = best_divisor(comm.size) if group is None else group
    if k < 1 or comm.size % k:
        raise ConfigError(f"hierarchical: {comm.size} ranks don't form groups of {k}; "
                          f"choose a divisor of {comm.size}")
    first = comm.rank - comm.rank % k
    team = comm.subgroup(range(first, first + k))
    chunks = cut(x, k)
    reduce_scatter_(team, chunks, op)  # rank r of the team now has chunk r + 1
    if team.rank:
        mine = chunks[(team.rank + 1) % k]
        team.send(mine, 0)
        team.recv(mine, 0)
    else:
        for other in range(1, k):
            team.recv(chunks[(other + 1) % k], other)
        ring(comm.subgroup(range(0, comm.size, k)), x, op)
        for other in range(1, k):
            team.send(chunks[(other + 1) % k], other)
    all_gather_(team, chunks)
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
    columns, rows = shape or (comm.size // best_divisor(comm.size), best_divisor(comm.size))
    if columns < 1 or rows < 1 or columns * rows != comm.size:
        raise ConfigError(f"torus: a grid of {columns} × {rows} doesn't fit {comm.size} ranks")
    row, pillar = (comm.subgroup(line) for line in lines(comm.rank, columns, comm.size))
    chunks = cut(x, columns)
    reduce_scatter_(row, chunks, op)
    ring(pillar, chunks[(row.rank + 1) % columns], op)
    all_gather_(row, chunks)
    return x


@algorithm("all_reduce", "two_ring")
def two_ring(
    comm: Comm, x: torch.Tensor, op: Op = "sum", cycles: Sequence[Sequence[int]] | None = None
) -> torch.Tensor:
    """In place: x is shared out among several rings, walked at the same time.

    cycles: each lists all ranks once, in the order of a ring; rings that share no wire double the
    bandwidth. A cycle named twice carries twice as much (for wires that are doubled). Default:
    once forwards, once backwards.
    Cost: 2(p−1)α + 2(p−1)/p·nβ on one port a rank; half the β term where the rings have wires of
    their own. Source: NCCL; Wang et al. 2020, Blink.
    """
    everyone = list(range(comm.size))
    cycles = [everyone, everyone[::-1]] if cycles is None else cycles
    for cycle in cycles:
        if sorted(cycle) != everyone:
            raise ConfigError(f"two_ring: {list(cycle)} is no cycle over the ranks 0 to "
                              f"{comm.size - 1}: each must occur exactly once")
    if not cycles:
        raise ConfigError("two_ring needs at least one cycle")
    laps = [Lap(comm, cut(share, comm.size), list(cycle), op)
            for share, cycle in zip(cut(x, len(cycles)), cycles, strict=True)]
    for step in range(2 * (comm.size - 1)):
        comm.exchange(*(message for lap in laps for message in lap.ops(step)))
        for lap in laps:
            lap.after(step)
    return x
