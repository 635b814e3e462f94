"""Closed forms of all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from dtlab.cost import broadcast_reduce as tree
from dtlab.cost.folding import binary_digits, fold, halved
from dtlab.cost.model import Form, best_divisor, chunk_bytes, costs, lg_ceil, pipelined


@costs("all_reduce", "flat")
def flat(p: int, n: int, itemsize: int) -> Form:
    """2(p−1)(α + nβ) + (p−1)nγ: reduce to one, broadcast, both flat."""
    return tree.reduce_flat(p, n, itemsize).then(tree.broadcast_flat(p, n, itemsize))


@costs("all_reduce", "tree")
def binomial(p: int, n: int, itemsize: int) -> Form:
    """2⌈lg p⌉(α + nβ) + ⌈lg p⌉nγ: reduce to one, broadcast, both binomial."""
    return tree.reduce_binomial(p, n, itemsize).then(tree.broadcast_binomial(p, n, itemsize))


@costs("all_reduce", "ring")
def ring(p: int, n: int, itemsize: int) -> Form:
    """2(p−1)(α + cβ) + (p−1)cγ, where c = ⌈n/p⌉ is the largest chunk: it sets every step's pace.

    Rank r never sends chunk r+1 in the first half (it ends there), nor chunk r+2 in the second.
    """
    chunks = chunk_bytes(n, p, itemsize)
    sent = [2 * n - chunks[(r + 1) % p] - chunks[(r + 2) % p] for r in range(p)]
    steps = 2 * (p - 1)
    return Form(steps, steps * chunks[0], (p - 1) * chunks[0], sent, [steps] * p)


@costs("all_reduce", "pipelined_ring")
def pipelined_ring(p: int, n: int, itemsize: int) -> Form:
    """N = 2(p−1)k pieces: see `pipelined`."""
    return pipelined(ring(p, n, itemsize), chunk_bytes(n, p, itemsize)[0], itemsize)


@costs("all_reduce", "recursive_doubling")
def recursive_doubling(p: int, n: int, itemsize: int) -> Form:
    """lg p(α + nβ + nγ) for powers of two; else 2α + 2nβ + nγ more."""
    core, extra = folding = fold(p)
    lg = lg_ceil(core)
    messages = [0] * p
    for place in range(core):
        rank = folding.rank_of(place)
        messages[rank] = lg + (place < extra)
        if place < extra:
            messages[rank + 1] = 1
    rounds, adds = (lg + 2, lg + 1) if extra else (lg, lg)
    return Form(rounds, rounds * n, adds * n, [n * m for m in messages], messages)


@costs("all_reduce", "halving_doubling")
def halving_doubling(p: int, n: int, itemsize: int) -> Form:
    """2 lg p·α + 2(p−1)/p·nβ + (p−1)/p·nγ for powers of two; else 2α + 2nβ + nγ more."""
    return _halving_doubling(p, n, itemsize, chunk_of=range(p))


@costs("all_reduce", "halving_doubling_near")
def halving_doubling_near(p: int, n: int, itemsize: int) -> Form:
    """The form of `halving_doubling`; only which rank gets which chunk differs, if n is uneven."""
    chunk_of = [0]
    while len(chunk_of) < fold(p).core:  # bits in reverse
        chunk_of = [2 * c for c in chunk_of] + [2 * c + 1 for c in chunk_of]
    return _halving_doubling(p, n, itemsize, chunk_of)


def _halving_doubling(p: int, n: int, itemsize: int, chunk_of: Sequence[int]) -> Form:
    """chunk_of: place in the core → the chunk with which it ends the first half."""
    core, extra = folding = fold(p)
    lg = lg_ceil(core)
    edges = list(accumulate(chunk_bytes(n, core, itemsize), initial=0))
    halves = sum(edges[1 << k] for k in range(lg))
    sent, messages = [0] * p, [0] * p
    for place in range(core):
        rank = folding.rank_of(place)
        for k in range(lg):  # the partner's half on the way down, mine on the way up: together
            whole = chunk_of[place] & -(2 << k)
            sent[rank] += edges[whole + (2 << k)] - edges[whole]
        messages[rank] = 2 * lg + (place < extra)
        if place < extra:
            sent[rank] += n
            sent[rank + 1], messages[rank + 1] = n, 1
    if extra:
        return Form(2 * lg + 2, 2 * halves + 2 * n, halves + n, sent, messages)
    return Form(2 * lg, 2 * halves, halves, sent, messages)


@costs("all_reduce", "two_ring")
def two_ring(p: int, n: int, itemsize: int) -> Form:
    """At most 4(p−1)(α + cβ) + 2(p−1)cγ on one port, chunks of c = n/2p bytes: in each step one
    ring's message starts after the other's."""
    one, other = (ring(p, half, itemsize) for half in chunk_bytes(n, 2, itemsize))
    sent = [a + b for a, b in zip(one.sent_bytes, other.sent_bytes[::-1], strict=True)]
    return Form(one.rounds + other.rounds, one.path_bytes + other.path_bytes,
                one.reduced_bytes + other.reduced_bytes, sent, [4 * (p - 1)] * p, exact=False)


def _both_halves(n: int, chunks: list[int]) -> list[int]:
    """Bytes that each rank sends in a reduce-scatter and an all-gather of `chunks` round a ring:
    all but its own chunk, and all but the next rank's."""
    return [2 * n - chunk - following
            for chunk, following in zip(chunks, chunks[1:] + chunks[:1], strict=True)]


@costs("all_reduce", "hierarchical")
def hierarchical(p: int, n: int, itemsize: int) -> Form:
    """4(k−1) + 2(p/k−1) rounds, k = `best_divisor`: a ring's half in each group, all chunks to the
    leader, a ring of the leaders with all n bytes, and back."""
    k = best_divisor(p)
    inside, among = chunk_bytes(n, k, itemsize), ring(p // k, n, itemsize)
    others = n - inside[0]  # what the leader lacks after the group's reduce-scatter
    path = 2 * (k - 1) * inside[0] + 2 * others + among.path_bytes
    reduced = (k - 1) * inside[0] + among.reduced_bytes
    sent, messages = _both_halves(n, inside) * (p // k), [2 * (k - 1)] * p
    for rank in range(p):
        if rank % k:  # its chunk, to the leader
            sent[rank] += inside[rank % k]
            messages[rank] += 1
        else:
            sent[rank] += among.sent_bytes[rank // k] + others
            messages[rank] += among.messages[rank // k] + k - 1
    return Form(4 * (k - 1) + among.rounds, path, reduced, sent, messages, exact=k == 1)


@costs("all_reduce", "torus")
def torus(p: int, n: int, itemsize: int) -> Form:
    """2(X−1) + 2(Y−1) rounds and the ring's bytes, Y = `best_divisor`."""
    rows = best_divisor(p)
    columns = p // rows
    across = chunk_bytes(n, columns, itemsize)
    along, down = ring(columns, n, itemsize), [ring(rows, c, itemsize) for c in across]
    in_row = _both_halves(n, across)
    sent, messages = [], []
    for rank in range(p):
        row, column = divmod(rank, columns)
        sent.append(in_row[column] + down[column].sent_bytes[row])
        messages.append(along.messages[column] + down[column].messages[row])
    return Form(along.rounds + down[0].rounds, along.path_bytes + down[0].path_bytes,
                along.reduced_bytes + down[0].reduced_bytes, sent, messages, exact=False)


@costs("all_reduce", "binary_blocks")
def binary_blocks(p: int, n: int, itemsize: int) -> Form:
    """At most halving and doubling in the largest block; and where a block of s ranks hands up to
    one of c·s, (c+1)α + 2n/s·β + n/s·γ on top, less what overlaps of the c messages that a rank
    posts together."""
    levels = [level for _, level in binary_digits(p)]
    elements = n // itemsize
    sent, messages = [], []
    for number, level in enumerate(levels):
        for place in range(1 << level):
            own = sum(_piece(elements, place, k) for k in range(level))  # a half there, one back
            count = 2 * level
            if number + 1 < len(levels):  # the answer, down
                own += _piece(elements, place, level)
                count += 1
            if number:  # the piece, up, in parts
                own += _piece(elements, place, level)
                count += 1 << (levels[number - 1] - level)
            sent.append(own * itemsize)
            messages.append(count)
    inside = 2 * sum(_piece(elements, 0, k + 1) for k in range(levels[0]))
    between = sum(_piece(elements, 0, level) for level in levels[1:])
    together = [((1 << larger - level) - 1, elements >> larger)
                for larger, level in pairwise(levels)]
    path, reduced = inside + 2 * between, inside / 2 + between
    rounds = 2 * levels[0] + sum(count + 2 for count, _ in together)
    return Form(rounds, path * itemsize, reduced * itemsize, sent, messages,
                exact=len(levels) == 1,
                together=tuple((count, part * itemsize) for count, part in together))


def _piece(n: int, place: int, level: int) -> int:
    """Count the elements of n that are left after `level` halvings."""
    low, high = halved(n, place, level)
    return high - low


@costs("all_reduce", "double_tree")
def double_tree(p: int, n: int, itemsize: int) -> Form:
    """At most 2⌈lg p⌉(α + c(8β + 2γ)) + 4k·max(α, 2cβ) + 2kcγ, c = n/2k bytes in a segment, k = 16
    a tree: as if a rank's 4k messages shared its port two by two."""
    if p == 1:
        return Form(0, 0, 0, [0], [0])
    segments = 16
    parts = chunk_bytes(n, 2 * segments, itemsize)
    sent, messages = [0] * p, [0] * p
    for rank in range(p):
        mirrored = p - 1 - rank if p % 2 == 0 else (rank - 1) % p
        for half, place in enumerate((rank, mirrored)):
            sent[rank] += _degree(p, place) * sum(parts[half::2])
            messages[rank] += _degree(p, place) * segments
    c, stream, height = parts[0], 4 * segments, 2 * lg_ceil(p)
    return Form(stream + height, 8 * (segments + height) * c, 2 * (segments + height) * c, sent,
                messages, exact=False, together=((stream, 2 * c),), awaited=stream)


def _degree(p: int, place: int) -> int:
    """Count the neighbours in the tree: each of them gets one message a segment."""
    if place == 0:
        return 1
    bit = place & -place
    right = bit // 2
    while right and place + right >= p:
        right //= 2
    return 1 + (bit > 1) + (right > 0)
