"""The binomial tree over p ranks with root 0: a rank's parent is its number without its lowest
one-bit, its children set one bit below that."""

from __future__ import annotations


def subtree_size(me: int, p: int) -> int:
    """Count the ranks in the subtree of rank `me`: those from it on.

    >>> [subtree_size(me, 6) for me in range(6)]
    [6, 1, 2, 1, 2, 1]
    """
    return min(me & -me, p - me) if me else p


def children_counts(p: int) -> list[int]:
    """Count the children of each rank.

    >>> children_counts(6)
    [3, 0, 1, 0, 1, 0]
    """
    counts = [0] * p
    for rank in range(1, p):
        counts[rank & rank - 1] += 1
    return counts
