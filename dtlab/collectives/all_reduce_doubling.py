"""All-reduce in lg p rounds: partners twice as far away each time.

In the registry of `all_reduce`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtlab.collectives.registry import algorithm, chunk_edges
from dtlab.comm import Comm, Recv, Send
from dtlab.cost.folding import Folding, binary_digits, fold, halved
from dtlab.reduction import Op


@algorithm("all_reduce", "recursive_doubling")
def recursive_doubling(comm: Comm, x: torch.Tensor, op: Op = "sum") -> torch.Tensor:
    """In place: swap everything with a partner, add; partners are 1, 2, 4, … apart.

    The fewest rounds there are, but all of x in each. The lower rank's operand stands on the left
    on both sides, so both get the same bits, and `op` need not commute.
    Cost: lg p(α + nβ + nγ); p not a power of two, by folding: two rounds more, one of them adds.
    Source: Thakur, Rabenseifner, Gropp 2005, §4.5.
    """
    folding, me = fold(comm.size), comm.rank
    place = _fold_in(comm, folding, x, op)
    if place is None:
        return x
    theirs = torch.empty_like(x)
    distance = 1
    while distance < folding.core:
        partner = folding.rank_of(place ^ distance)
        comm.sendrecv(x, partner, theirs, partner)
        if me < partner:
            comm.accumulate_(x, theirs, op)
        else:
            x.copy_(comm.accumulate_(theirs, x, op))
        distance *= 2
    if place < folding.extra:
        comm.send(x, me + 1)
    return x


def _fold_in(comm: Comm, folding: Folding, x: torch.Tensor, op: Op) -> int | None:
    """A rank outside the core sends x to its neighbour in the core, waits for the result, and gets
    None; the others get their place in the core."""
    me = comm.rank
    place = folding.place_of(me)
    if place is None:
        comm.send(x, me - 1)
        comm.recv(x, me - 1)
    elif place < folding.extra:
        theirs = torch.empty_like(x)
        comm.recv(theirs, me + 1)
        comm.accumulate_(x, theirs, op)
    return place


@algorithm("all_reduce", "halving_doubling")
def halving_doubling(
    comm: Comm, x: torch.Tensor, op: Op = "sum", near: bool = False
) -> torch.Tensor:
    """In place: halve the vector while doubling up the sums, then double it again.

    First a reduce-scatter among the core: swap halves with a partner far away, add one half, go on
    with that one and a nearer partner. Then the same way back, as an all-gather. near: the nearest
    partner comes first, see `halving_doubling_near`.
    Cost: 2 lg p·α + 2(p−1)/p·nβ + (p−1)/p·nγ: the ring's bytes in a tree's rounds. p not a power
    of two, by folding: 2α + 2nβ + nγ more. Source: Rabenseifner 2004.
    """
    folding, me = fold(comm.size), comm.rank
    place = _fold_in(comm, folding, x, op)
    if place is None:
        return x
    inbox = torch.empty_like(x)
    edges = chunk_edges(x.numel(), folding.core)
    bits = folding.core.bit_length() - 1
    own = _reversed(place, bits) if near else place  # the chunk with which I end the first half
    distances = [1 << bit for bit in reversed(range(bits))]

    def partner(distance: int) -> int:
        chunk = own ^ distance
        return folding.rank_of(_reversed(chunk, bits) if near else chunk)

    for distance in distances:
        keep, give = _halves(x, edges, own, distance)
        comm.sendrecv(give, partner(distance), inbox[: keep.numel()], partner(distance))
        comm.accumulate_(keep, inbox[: keep.numel()], op)
    for distance in reversed(distances):
        have, lack = _halves(x, edges, own, distance)
        comm.sendrecv(have, partner(distance), lack, partner(distance))

    if place < folding.extra:
        comm.send(x, me + 1)
    return x


@algorithm("all_reduce", "halving_doubling_near")
def halving_doubling_near(comm: Comm, x: torch.Tensor, op: Op = "sum") -> torch.Tensor:
    """In place: `halving_doubling` with partners 1, 2, 4, … apart in the first half.

    So the halves of x go to neighbours, and only small pieces travel far; rank r of a power of two
    ends the first half with the chunk whose number is r's, its bits in reverse.
    Cost: that of `halving_doubling`, which differs only where the network is not uniform.
    Source: Rabenseifner 2004; MPICH, "reduce_scatter_allgather".
    """
    return halving_doubling(comm, x, op, near=True)


def _reversed(i: int, bits: int) -> int:
    """The lowest `bits` bits of i in reverse order.

    >>> _reversed(0b011, 3) == 0b110
    True
    """
    return sum((i >> bit & 1) << bits - 1 - bit for bit in range(bits))


def _halves(
    x: torch.Tensor, edges: Sequence[int], own: int, distance: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `distance` chunks that I share with my group, mine among them; and my partner's."""
    mine, theirs = own & -distance, (own ^ distance) & -distance
    return (x[edges[mine] : edges[mine + distance]], x[edges[theirs] : edges[theirs + distance]])


@algorithm("all_reduce", "binary_blocks")
def binary_blocks(comm: Comm, x: torch.Tensor, op: Op = "sum") -> torch.Tensor:
    """In place: p is cut into blocks by its binary digits, the largest on the lowest ranks.

    Each block reduce-scatters inside. From the smallest block up, every rank cuts its piece to fit
    and hands it to the next larger block, which adds; the answers come back down the same way.
    Then each block all-gathers. No rank idles as in folding, and none ever sends all of x.
    Cost: at most 2⌊lg p⌋α + 2n(β + γ/2) inside the largest block, and for each smaller block of s
    ranks, c times as small as the next larger one, (c+1)α + 2n/s·β + n/s·γ more: fine for 8 + 4,
    lopsided for 16 + 1.
    Source: Rabenseifner 2004.
    """
    n, blocks = x.numel(), binary_digits(comm.size)
    mine = next(b for b, (first, levels) in enumerate(blocks) if comm.rank < first + (1 << levels))
    first, levels = blocks[mine]
    place = comm.rank - first
    inbox = torch.empty_like(x)

    def piece(place: int, level: int) -> torch.Tensor:
        low, high = halved(n, place, level)
        return x[low:high]

    for level in range(levels):  # reduce-scatter inside the block: partners 1, 2, 4, … apart
        partner = place ^ 1 << level
        keep, give = piece(place, level + 1), piece(partner, level + 1)
        summand = inbox[: keep.numel()]
        comm.sendrecv(give, first + partner, summand, first + partner)
        comm.accumulate_(keep, summand, op)

    own = piece(place, levels)
    if mine + 1 < len(blocks):  # the next smaller block hands up
        below, size = blocks[mine + 1][0], 1 << blocks[mine + 1][1]
        summand = inbox[: own.numel()]
        comm.recv(summand, below + place % size)
        comm.accumulate_(own, summand, op)
    if mine:  # hand up, to every rank of the next larger block whose piece lies inside of mine
        above, more = blocks[mine - 1]
        above_places = range(place, 1 << more, 1 << levels)
        fits = [(above + i, piece(i, more)) for i in above_places]
        comm.exchange(*(Send(part, rank) for rank, part in fits))
        comm.exchange(*(Recv(part, rank) for rank, part in fits))
    if mine + 1 < len(blocks):
        comm.send(own, below + place % size)

    for level in reversed(range(levels)):  # all-gather inside the block
        partner = place ^ 1 << level
        comm.sendrecv(piece(place, level + 1), first + partner,
                      piece(partner, level + 1), first + partner)
    return x
