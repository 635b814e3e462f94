"""The binomial tree: who is whose parent, and whose rows a subtree holds."""

from __future__ import annotations


def subtree(me: int, p: int) -> tuple[int, list[tuple[int, int, int]], int]:
    """Of rank `me` in the binomial tree over p ranks with root 0: parent, children, size.

    The subtree of a rank is the `size` ranks from it on. Children come largest first, each as
    (rank, first, after): its subtree is the ranks me + first … me + after − 1.

    >>> subtree(0, 6)
    (0, [(4, 4, 6), (2, 2, 4), (1, 1, 2)], 6)
    """
    bit = 1
    while bit < p and not me & bit:
        bit *= 2
    parent, size = me & ~bit, min(bit, p - me)
    children = []
    while bit > 1:
        bit //= 2
        if me + bit < p:
            children.append((me + bit, bit, min(2 * bit, p - me)))
    return parent, children, size
