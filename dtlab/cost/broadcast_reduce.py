"""Closed forms of broadcast and reduce: the same trees, walked down or up."""

from __future__ import annotations

from dtlab.cost.model import Form, costs, lg_ceil


def binomial_children(p: int) -> list[int]:
    """How many children each rank has in the binomial tree over p ranks with root 0."""
    counts = [0] * p
    for rank in range(1, p):
        counts[rank & (rank - 1)] += 1  # the parent: my number without its lowest one-bit
    return counts


@costs("broadcast", "flat")
def broadcast_flat(p: int, n: int, itemsize: int) -> Form:
    """(p−1)(α + nβ): the root sends p−1 times."""
    leaves = [0] * (p - 1)
    return Form(p - 1, (p - 1) * n, 0, [(p - 1) * n, *leaves], [p - 1, *leaves])


@costs("broadcast", "binomial")
def broadcast_binomial(p: int, n: int, itemsize: int) -> Form:
    """⌈lg p⌉(α + nβ): who has it sends it on; each round doubles them."""
    children = binomial_children(p)
    return Form(lg_ceil(p), lg_ceil(p) * n, 0, [c * n for c in children], children)


@costs("reduce", "flat")
def reduce_flat(p: int, n: int, itemsize: int) -> Form:
    """(p−1)(α + nβ + nγ): the root receives and adds p−1 times."""
    total = (p - 1) * n
    return Form(p - 1, total, total, [0] + [n] * (p - 1), [0] + [1] * (p - 1))


@costs("reduce", "binomial")
def reduce_binomial(p: int, n: int, itemsize: int) -> Form:
    """⌈lg p⌉(α + nβ + nγ): the broadcast's tree, upwards."""
    total = lg_ceil(p) * n
    return Form(lg_ceil(p), total, total, [0] + [n] * (p - 1), [0] + [1] * (p - 1))
