"""Closed forms of scan and exclusive scan."""

from __future__ import annotations

from dtlab.cost.model import Form, costs, lg_ceil


@costs("scan", "linear")
def linear(p: int, n: int, itemsize: int) -> Form:
    """(p−1)(α + nβ + nγ)."""
    total = (p - 1) * n
    return Form(p - 1, total, total, [n] * (p - 1) + [0], [1] * (p - 1) + [0])


@costs("scan", "recursive_doubling")
def recursive_doubling(p: int, n: int, itemsize: int) -> Form:
    """⌈lg p⌉(α + nβ + nγ): the last rank receives, and adds, in every round."""
    total = lg_ceil(p) * n
    messages = [lg_ceil(p - rank) for rank in range(p)]  # to 1, 2, 4, … ranks ahead, where one is
    return Form(lg_ceil(p), total, total, [n * count for count in messages], messages)


@costs("exscan", "linear")
def exclusive_linear(p: int, n: int, itemsize: int) -> Form:
    """(p−1)(α + nβ) + (p−2)nγ."""
    return linear(p, n, itemsize)._replace(reduced_bytes=max(p - 2, 0) * n)


@costs("exscan", "recursive_doubling")
def exclusive_recursive_doubling(p: int, n: int, itemsize: int) -> Form:
    """⌈lg p⌉(α + nβ) + 2(⌈lg p⌉ − 1)nγ: two sums a round; one in the first, and in the last."""
    adds = 2 * max(lg_ceil(p) - 1, 0)
    return recursive_doubling(p, n, itemsize)._replace(reduced_bytes=adds * n)
