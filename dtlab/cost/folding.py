"""Folding: how an algorithm for powers of two serves any number of ranks.

Let p′ be the largest power of two that is at most p, and r = p − p′ the ranks too many. Among the
first 2r ranks each odd one hands its data to its even neighbour, waits, and gets the result back.
The p′ ranks that remain, the *core*, run the algorithm. Source: Rabenseifner 2004, §2.
"""

from __future__ import annotations

from typing import NamedTuple


class Folding(NamedTuple):
    """The core of p ranks: `core` = p′ of them, with `extra` = r folded into the first r."""

    core: int
    extra: int

    def rank_of(self, i: int) -> int:
        """The rank of the i-th member of the core: members 0 … i−1 stand for the ranks below."""
        return i + min(i, self.extra)

    def place_of(self, rank: int) -> int | None:
        """The place of `rank` in the core; None if it is folded into its neighbour."""
        if rank >= 2 * self.extra:
            return rank - self.extra
        return rank // 2 if rank % 2 == 0 else None


def fold(p: int) -> Folding:
    """The folding of p ranks.

    >>> fold(6)
    Folding(core=4, extra=2)
    """
    core = 1 << (p.bit_length() - 1)
    return Folding(core, p - core)
