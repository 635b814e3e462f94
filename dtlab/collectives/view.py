"""The rows and columns of a grid of ranks."""

from __future__ import annotations


def lines(rank: int, columns: int, ranks: int) -> tuple[range, range]:
    """The row and the column of `rank` in a grid of all ranks, where rank = columns·row + column.

    >>> lines(5, 4, 8)
    (range(4, 8), range(1, 8, 4))
    """
    first = rank - rank % columns
    return range(first, first + columns), range(rank % columns, ranks, columns)
