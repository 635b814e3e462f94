"""Closed forms of scan and exclusive scan."""

from __future__ import annotations

from dtlab.cost.model import Form, costs, lg_ceil


def _shifts(p: int) -> list[int]:
    """Count the messages that each rank sends by recursive doubling: to p′ ranks ahead, if any."""
    return [lg_ceil(p - rank) for rank in range(p)]


@costs("scan", "linear")
def linear(p: int, n: int, itemsize: int) -> Form:
    """(p−1)(α + nβ + nγ)."""
    total = (p - 1) * n
    return Form(p - 1, total, total, [n] * (p - 1) + [0], [1] * (p - 1) + [0])


@costs("scan", "recursive_doubling")
def recursive_doubling(p: int, n: int, itemsize: int) -> Form:
    """⌈lg p⌉(α + nβ + nγ): the last rank receives, and adds, in every round."""
    total = lg_ceil(p) * n
    return Form(lg_ceil(p), total, total, [n * s for s in _shifts(p)], _shifts(p))


@costs("exscan", "linear")
def exclusive_linear(p: int, n: int, itemsize: int) -> Form:
    """(p−1)(α + nβ) + (p−2)nγ."""
    sent, messages = [n] * (p - 1) + [0], [1] * (p - 1) + [0]
    return Form(p - 1, (p - 1) * n, max(p - 2, 0) * n, sent, messages)


@costs("exscan", "recursive_doubling")
def exclusive_recursive_doubling(p: int, n: int, itemsize: int) -> Form:
    """⌈lg p⌉(α + nβ) + 2(⌈lg p⌉ − 1)nγ: two sums a round; one in the first, and in the last."""
    lg = lg_ceil(p)
    return Form(lg, lg * n, 2 * max(lg - 1, 0) * n, [n * s for s in _shifts(p)], _shifts(p))
