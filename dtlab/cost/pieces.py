"""Closed forms of scatter, gather, all-gather, reduce-scatter and all-to-all.

n is the size of all p parts together, b = n/p that of one.
"""

from __future__ import annotations

from dtlab.cost.folding import Folding, fold
from dtlab.cost.model import Form, best_divisor, costs, lg_ceil, pipelined
from dtlab.cost.tree import children_counts, subtree_size


@costs("scatter", "linear")
def scatter_linear(p: int, n: int, itemsize: int) -> Form:
    """(p−1)(α + bβ): the root serves one rank after the other."""
    b, leaves = n // p, [0] * (p - 1)
    return Form(p - 1, (p - 1) * b, 0, [(p - 1) * b, *leaves], [p - 1, *leaves])


@costs("scatter", "linear_nonblocking")
def scatter_nonblocking(p: int, n: int, itemsize: int) -> Form:
    """α + bβ + (p−2)·max(α, bβ): all sends are posted together."""
    return scatter_linear(p, n, itemsize)._replace(together=((max(p - 2, 0), n // p),))


@costs("scatter", "binomial")
def scatter_binomial(p: int, n: int, itemsize: int) -> Form:
    """⌈lg p⌉α + (p−1)bβ: the root's sends; every other path is as long or shorter."""
    b = n // p
    sent = [(subtree_size(rank, p) - 1) * b for rank in range(p)]  # all but one's own part
    return Form(lg_ceil(p), (p - 1) * b, 0, sent, children_counts(p))


@costs("gather", "linear")
def gather_linear(p: int, n: int, itemsize: int) -> Form:
    """(p−1)(α + bβ)."""
    b = n // p
    return Form(p - 1, (p - 1) * b, 0, [0] + [b] * (p - 1), [0] + [1] * (p - 1))


@costs("gather", "linear_nonblocking")
def gather_nonblocking(p: int, n: int, itemsize: int) -> Form:
    """At most α + bβ + (p−2)·max(α, bβ): as if receiving had an overhead, too."""
    together = ((max(p - 2, 0), n // p),)
    return gather_linear(p, n, itemsize)._replace(together=together, exact=p < 3)


@costs("gather", "binomial")
def gather_binomial(p: int, n: int, itemsize: int) -> Form:
    """⌈lg p⌉α + (p−1)bβ: scatter, backwards."""
    b = n // p
    sent = [0] + [subtree_size(rank, p) * b for rank in range(1, p)]
    return Form(lg_ceil(p), (p - 1) * b, 0, sent, [0] + [1] * (p - 1))


@costs("all_gather", "ring")
def all_gather_ring(p: int, n: int, itemsize: int) -> Form:
    """(p−1)(α + bβ)."""
    steps, b = p - 1, n // p
    return Form(steps, steps * b, 0, [steps * b] * p, [steps] * p)


@costs("all_gather", "pipelined_ring")
def all_gather_pipelined(p: int, n: int, itemsize: int) -> Form:
    """N = (p−1)k pieces: see `pipelined`."""
    return pipelined(all_gather_ring(p, n, itemsize), n // p, itemsize)


@costs("all_gather", "recursive_doubling")
def all_gather_doubling(p: int, n: int, itemsize: int) -> Form:
    """lg p·α + (p−1)bβ for powers of two. Else two rounds more, and pb + b more bytes, the path
    being that of the first group, where folding has put the most parts."""
    core, extra = folding = fold(p)
    lg, b = lg_ceil(core), n // p
    path = sum(_weight(folding, 0, 1 << k) for k in range(lg)) * b
    sent, messages = [0] * p, [0] * p
    for place in range(core):
        rank = folding.rank_of(place)
        for k in range(lg):
            sent[rank] += _weight(folding, place & -(1 << k), 1 << k) * b
        messages[rank] = lg
        if place < extra:
            sent[rank] += p * b
            messages[rank] += 1
            sent[rank + 1], messages[rank + 1] = b, 1
    if extra:
        return Form(lg + 2, path + b + p * b, 0, sent, messages)
    return Form(lg, path, 0, sent, messages)


def _weight(folding: Folding, place: int, count: int) -> int:
    """Count the ranks that `count` members of the core stand for, from `place` on."""
    return folding.rank_of(place + count) - folding.rank_of(place)


@costs("all_gather", "bruck")
def all_gather_bruck(p: int, n: int, itemsize: int) -> Form:
    """⌈lg p⌉α + (p−1)bβ, for any p."""
    lg, b = lg_ceil(p), n // p
    return Form(lg, (p - 1) * b, 0, [(p - 1) * b] * p, [lg] * p)


@costs("reduce_scatter", "ring")
def reduce_scatter_ring(p: int, n: int, itemsize: int) -> Form:
    """(p−1)(α + bβ + bγ)."""
    return reduce_scatter_pairwise(p, n, itemsize)


@costs("reduce_scatter", "pipelined_ring")
def reduce_scatter_pipelined(p: int, n: int, itemsize: int) -> Form:
    """N = (p−1)k pieces: see `pipelined`."""
    return pipelined(reduce_scatter_ring(p, n, itemsize), n // p, itemsize)


@costs("reduce_scatter", "pairwise")
def reduce_scatter_pairwise(p: int, n: int, itemsize: int) -> Form:
    """(p−1)(α + bβ + bγ)."""
    total = (p - 1) * (n // p)
    return Form(p - 1, total, total, [total] * p, [p - 1] * p)


@costs("reduce_scatter", "recursive_halving")
def reduce_scatter_halving(p: int, n: int, itemsize: int) -> Form:
    """lg p·α + (p−1)b(β + γ) for powers of two. Else: all parts more before, one more after."""
    core, extra = folding = fold(p)
    lg, b = lg_ceil(core), n // p
    path = sum(_weight(folding, 0, 1 << k) for k in range(lg)) * b
    sent, messages = [0] * p, [0] * p
    for place in range(core):
        rank = folding.rank_of(place)
        for k in range(lg):
            partner = place ^ (1 << k)
            sent[rank] += _weight(folding, partner & -(1 << k), 1 << k) * b
        messages[rank] = lg
        if place < extra:
            sent[rank] += b
            messages[rank] += 1
            sent[rank + 1], messages[rank + 1] = p * b, 1
    if extra:
        return Form(lg + 2, path + p * b + b, path + p * b, sent, messages)
    return Form(lg, path, path, sent, messages)


@costs("all_to_all", "linear")
def all_to_all_linear(p: int, n: int, itemsize: int) -> Form:
    """α + bβ + (p−2)·max(α, bβ): all sends are posted together."""
    together = ((max(p - 2, 0), n // p),)
    return all_to_all_pairwise(p, n, itemsize)._replace(together=together)


@costs("all_to_all", "pairwise")
def all_to_all_pairwise(p: int, n: int, itemsize: int) -> Form:
    """(p−1)(α + bβ)."""
    total = (p - 1) * (n // p)
    return Form(p - 1, total, 0, [total] * p, [p - 1] * p)


@costs("all_to_all", "mesh")
def all_to_all_mesh(p: int, n: int, itemsize: int) -> Form:
    """At most (X + Y − 2)α + (2p − X − Y)bβ, on a grid of X × Y: X − 1 messages of Y parts, posted
    together, then Y − 1 of X."""
    y = best_divisor(p)
    x = p // y
    total = (2 * p - x - y) * (n // p)
    together = ((max(x - 2, 0), y * (n // p)), (max(y - 2, 0), x * (n // p)))
    return Form(x + y - 2, total, 0, [total] * p, [x + y - 2] * p, together=together)


@costs("all_to_all", "central")
def all_to_all_central(p: int, n: int, itemsize: int) -> Form:
    """At most 2(α + nβ + (p−2)·max(α, nβ)): gather and scatter of all that all have."""
    whole = p, p * n, itemsize
    return gather_nonblocking(*whole).then(scatter_nonblocking(*whole))


@costs("all_to_all", "bruck")
def all_to_all_bruck(p: int, n: int, itemsize: int) -> Form:
    """⌈lg p⌉α, and bβ for every one-bit in the numbers 0 … p−1: about (n/2)⌈lg p⌉β."""
    lg, total = lg_ceil(p), sum(d.bit_count() for d in range(p)) * (n // p)
    return Form(lg, total, 0, [total] * p, [lg] * p)
