"""All-reduce over two binary trees at once. In the registry of `all_reduce`."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from dtlab.collectives.registry import algorithm, cut
from dtlab.comm import Comm, Work
from dtlab.reduction import Op

UP, DOWN = 0, 1


@algorithm("all_reduce", "double_tree")
def double_tree(
    comm: Comm, x: torch.Tensor, op: Op = "sum", segments: int = 16
) -> torch.Tensor:
    """In place: half of x goes up and down one binary tree, half another one.

    Leaves of the first tree are inner ranks of the second, so that each port is used both
    ways. Each half is cut into `segments` that follow one another, up the tree to be summed, then
    down. Each rank does its tasks in the order in which they could be due (`Tree.moment`), so
    that it never waits for a late segment while an earlier one is there.
    Cost: at most 2⌈lg p⌉(α + c(8β + 2γ)) + 4k·max(α, 2cβ) + 2kcγ, k segments of c = n/2k bytes: a
    rank sends 2n in up to 4k messages. The literature's 2 lg p·α + 2nβ leaves out those 4k starts,
    and needs ports that serve one message at a time, by a schedule in which each rank sends one
    and receives one in every step; here messages share a port, and the first of them is late: where
    bytes rule, 16 ranks take about 4nβ.
    Source: Sanders, Speck, Träff 2009; NCCL 2.4.
    """
    p, me = comm.size, comm.rank
    pieces = cut(x, 2 * segments)
    parts = {(tree, s): pieces[2 * s + tree] for tree in (0, 1) for s in range(segments)}
    trees = Tree(p, mirrored=False), Tree(p, mirrored=True)

    # Receive from each neighbour in the order in which it sends: that of its own tasks.
    receives = []
    for (tree, s), part in parts.items():
        for child in trees[tree].children(me):
            receives.append((trees[tree].moment(child, UP, s), tree, s, child, part))
        parent = trees[tree].parent(me)
        if parent is not None:
            receives.append((trees[tree].moment(parent, DOWN, s), tree, s, parent, part))
    arriving: dict[tuple[int, int, int], tuple[Work, torch.Tensor]] = {}
    for _, tree, s, rank, part in sorted(receives, key=lambda row: row[:3]):
        inbox = torch.empty_like(part)
        arriving[tree, s, rank] = comm.irecv(inbox, rank), inbox

    tasks = sorted((trees[tree].moment(me, way, s), tree, s)
                   for tree, s in parts for way in (UP, DOWN))
    sending: list[Work] = []
    for (_, way), tree, s in tasks:
        part, parent, children = parts[tree, s], trees[tree].parent(me), trees[tree].children(me)
        if way == UP:
            for child in children:
                work, summand = arriving[tree, s, child]
                work.wait()
                comm.accumulate_(part, summand, op)
            sending += [comm.isend(part, parent)] if parent is not None else []
        else:
            if parent is not None:
                work, total = arriving[tree, s, parent]
                work.wait()
                part.copy_(total)
            sending += [comm.isend(part, child) for child in children]
    for work in sending:
        work.wait()
    return x


class Tree(NamedTuple):
    """A binary tree over p ranks, in order from left to right; of height ⌈lg p⌉ at most.

    Rank 0 is the root, with one child. A rank whose lowest one-bit is b has one child b/2 to the
    left, and one as far to the right, or nearer if there is no such rank. So odd ranks are leaves.
    Mirrored: the same tree with the ranks in reverse (p even), or shifted by one (p odd), so that
    even ranks are its leaves.
    """

    p: int
    mirrored: bool

    def _place_of(self, rank: int) -> int:
        """The rank's place in the unmirrored tree."""
        if not self.mirrored:
            return rank
        return self.p - 1 - rank if self.p % 2 == 0 else (rank - 1) % self.p

    def _rank_at(self, place: int) -> int:
        """The rank at a place in the unmirrored tree."""
        if not self.mirrored:
            return place
        return self.p - 1 - place if self.p % 2 == 0 else (place + 1) % self.p

    def parent(self, rank: int) -> int | None:
        """The parent of `rank`; None for the root."""
        place = self._place_of(rank)
        bit = place & -place
        if not place:
            return None
        above = (place ^ bit) | (bit << 1)
        return self._rank_at(above if above < self.p else place ^ bit)

    def children(self, rank: int) -> list[int]:
        """The children of `rank`: two at most."""
        place = self._place_of(rank)
        if not place:
            return [self._rank_at(1 << (self.p - 1).bit_length() - 1)] if self.p > 1 else []
        left = right = (place & -place) // 2
        while right and place + right >= self.p:
            right //= 2
        return [self._rank_at(place + step) for step in (-left, right) if step]

    @cache  # noqa: B019 - asked for each segment; a tree is two small numbers
    def height(self, rank: int) -> int:
        """The longest way from `rank` down to a leaf."""
        return max((1 + self.height(child) for child in self.children(rank)), default=0)

    def depth(self, rank: int) -> int:
        """The way from the root to `rank`."""
        parent = self.parent(rank)
        return 0 if parent is None else 1 + self.depth(parent)

    def moment(self, rank: int, way: int, segment: int) -> tuple[int, int]:
        """Return when `rank` can pass on a segment at the earliest, in messages since the start."""
        if way == UP:
            return segment + self.height(rank), UP
        return segment + self.height(self._rank_at(0)) + self.depth(rank), DOWN
