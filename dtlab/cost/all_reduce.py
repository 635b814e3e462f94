"""Closed forms of all-reduce."""

from __future__ import annotations

from dtlab.cost import broadcast_reduce as tree
from dtlab.cost.model import Form, chunk_bytes, costs


def one_after_the_other(first: Form, second: Form) -> Form:
    """The form of two calls in a row: every term adds."""
    return Form(
        first.rounds + second.rounds,
        first.path_bytes + second.path_bytes,
        first.reduced_bytes + second.reduced_bytes,
        [a + b for a, b in zip(first.sent_bytes, second.sent_bytes, strict=True)],
        [a + b for a, b in zip(first.messages, second.messages, strict=True)],
    )


@costs("all_reduce", "flat")
def flat(p: int, n: int, itemsize: int) -> Form:
    """2(p−1)(α + nβ) + (p−1)nγ: reduce to one, broadcast, both flat."""
    return one_after_the_other(
        tree.reduce_flat(p, n, itemsize), tree.broadcast_flat(p, n, itemsize)
    )


@costs("all_reduce", "tree")
def binomial(p: int, n: int, itemsize: int) -> Form:
    """2⌈lg p⌉(α + nβ) + ⌈lg p⌉nγ: reduce to one, broadcast, both binomial."""
    return one_after_the_other(
        tree.reduce_binomial(p, n, itemsize), tree.broadcast_binomial(p, n, itemsize)
    )


@costs("all_reduce", "ring")
def ring(p: int, n: int, itemsize: int) -> Form:
    """2(p−1)(α + cβ) + (p−1)cγ, where c = ⌈n/p⌉ is the largest chunk: it sets every step's pace.

    Rank r never sends chunk r+1 in the first half (it ends there), nor chunk r+2 in the second.
    """
    chunks = chunk_bytes(n, p, itemsize)
    sent = [2 * n - chunks[(r + 1) % p] - chunks[(r + 2) % p] for r in range(p)] if p > 1 else [0]
    steps = 2 * (p - 1)
    return Form(steps, steps * chunks[0], (p - 1) * chunks[0], sent, [steps] * p)
