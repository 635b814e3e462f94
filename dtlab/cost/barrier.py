"""Closed forms of the barrier: no bytes, only rounds."""

from __future__ import annotations

from dtlab.cost.model import Form, costs, lg_ceil
from dtlab.cost.tree import children_counts


@costs("barrier", "dissemination")
def dissemination(p: int, n: int, itemsize: int) -> Form:
    """⌈lg p⌉α: in round k each rank sends to the one 2^k further on."""
    return Form(lg_ceil(p), 0, 0, [0] * p, [lg_ceil(p)] * p)


@costs("barrier", "central")
def central(p: int, n: int, itemsize: int) -> Form:
    """2(p−1)α."""
    return Form(2 * (p - 1), 0, 0, [0] * p, [p - 1] + [1] * (p - 1))


@costs("barrier", "tree")
def tree(p: int, n: int, itemsize: int) -> Form:
    """2⌈lg p⌉α."""
    messages = [c + (rank > 0) for rank, c in enumerate(children_counts(p))]
    return Form(2 * lg_ceil(p), 0, 0, [0] * p, messages)
