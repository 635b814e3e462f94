"""Closed forms of broadcast and reduce: the same trees, walked down or up."""

from __future__ import annotations

import math

from dtlab.cost.folding import fold
from dtlab.cost.model import Form, chunk_bytes, costs, lg_ceil
from dtlab.cost.tree import children_counts, subtree_size


@costs("broadcast", "flat")
def broadcast_flat(p: int, n: int, itemsize: int) -> Form:
    """(p−1)(α + nβ): the root sends p−1 times."""
    leaves = [0] * (p - 1)
    return Form(p - 1, (p - 1) * n, 0, [(p - 1) * n, *leaves], [p - 1, *leaves])


@costs("broadcast", "binomial")
def broadcast_binomial(p: int, n: int, itemsize: int) -> Form:
    """⌈lg p⌉(α + nβ): who has it sends it on; each round doubles them."""
    children = children_counts(p)
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


SEGMENTS = 8  # what the chains use unless told otherwise


def chain_form(p: int, n: int, itemsize: int, segments: int) -> Form:
    """A broadcast down a chain in k segments, (p−2+k)(α + nβ/k): the last one starts when k−1 have
    passed the first link, and then has p−2 links more."""
    if p == 1:
        return Form(0, 0, 0, [0], [0])
    k, unit = segments, math.gcd(n, itemsize)
    largest = -(-n // (k * unit)) * unit
    sent = [n] * (p - 1) + [0]
    return Form(p - 2 + k, n + (p - 2) * largest, 0, sent, [k] * (p - 1) + [0])


@costs("broadcast", "chain")
def broadcast_chain(p: int, n: int, itemsize: int) -> Form:
    """(p−2+k)(α + nβ/k): see `chain_form`."""
    return chain_form(p, n, itemsize, SEGMENTS)


@costs("reduce", "chain")
def reduce_chain(p: int, n: int, itemsize: int) -> Form:
    """(p−2+k)(α + nβ/k + nγ/k): the broadcast's chain, backwards."""
    down = broadcast_chain(p, n, itemsize)
    return down._replace(reduced_bytes=down.path_bytes, sent_bytes=down.sent_bytes[::-1],
                         messages=down.messages[::-1])


@costs("broadcast", "scatter_allgather")
def broadcast_scatter_allgather(p: int, n: int, itemsize: int) -> Form:
    """(⌈lg p⌉ + p−1)α + 2(p−1)/p·nβ: the root's sends, then a ring."""
    chunks = chunk_bytes(n, p, itemsize)
    sent = [n - chunks[(rank + 1) % p] for rank in range(p)] if p > 1 else [0]
    for rank in range(p):  # all of its subtree's chunks but its own
        sent[rank] += sum(chunks[rank + 1 : rank + subtree_size(rank, p)])
    messages = [c + p - 1 for c in children_counts(p)]
    path = sum(chunks[1:]) + (p - 1) * chunks[0]
    return Form(lg_ceil(p) + p - 1, path, 0, sent, messages)


@costs("reduce", "rabenseifner")
def reduce_rabenseifner(p: int, n: int, itemsize: int) -> Form:
    """2 lg p·α + 2(p−1)/p·nβ + (p−1)/p·nγ for powers of two; else α + n(β + γ) more."""
    core, extra = folding = fold(p)
    lg, chunks = lg_ceil(core), chunk_bytes(n, core, itemsize)
    halves = sum(sum(chunks[: 1 << k]) for k in range(lg))
    path = halves + sum(chunks[1:])  # then rank 0 receives all but its own chunk
    sent, messages = [0] * p, [0] * p
    for place in range(core):
        rank = folding.rank_of(place)
        for k in range(lg):
            theirs = (place ^ (1 << k)) & -(1 << k)
            sent[rank] += sum(chunks[theirs : theirs + (1 << k)])
        messages[rank] = lg + (place > 0)
        sent[rank] += sum(chunks[place : place + (place & -place)]) if place else 0
        if place < extra:
            sent[rank + 1], messages[rank + 1] = n, 1
    if extra:
        return Form(2 * lg + 1, path + n, halves + n, sent, messages)
    return Form(2 * lg, path, halves, sent, messages)
