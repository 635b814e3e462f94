"""Folding and binary blocks: how an algorithm for powers of two serves any number of ranks.

Folding: let p′ be the largest power of two that is at most p, and r = p − p′ the ranks too many.
Among the first 2r ranks each odd one hands its data to its even neighbour, waits, and gets the
result back. The p′ ranks that remain, the *core*, run the algorithm. Binary blocks: p is the sum of
the powers of two that are its binary digits, and each block of ranks has one of these sizes.
Source: Rabenseifner 2004.
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


def binary_digits(p: int) -> list[tuple[int, int]]:
    """The blocks of p ranks, largest first, each as (first rank, lg of its size).

    >>> binary_digits(13)  # 8 + 4 + 1
    [(0, 3), (8, 2), (12, 0)]
    """
    blocks, first = [], 0
    for level in reversed(range(p.bit_length())):
        if p >> level & 1:
            blocks.append((first, level))
            first += 1 << level
    return blocks


def halved(n: int, place: int, level: int) -> tuple[int, int]:
    """Halve 0 … n `level` times; bit k of `place` chooses a half in round k."""
    low, high = 0, n
    for bit in range(level):
        middle = (low + high + 1) // 2
        low, high = (middle, high) if place >> bit & 1 else (low, middle)
    return low, high
