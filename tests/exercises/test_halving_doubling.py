"""Wrong halvings and doublings: each loses the points of its mistake, with a fitting hint."""

from __future__ import annotations

import pytest
import torch

from tests.exercises.answers import first_hint, judged, lost, solutions

ALL = {"sums", "any p", "any n", "any dtype", "bytes", "rounds", "memory", "real"}


def edges_of(n, core):
    small, extra = divmod(n, core)
    return [c * small + min(c, extra) for c in range(core + 1)]


def among(comm, x, members, *, edges=edges_of, distances=None, back=None, gather=True,
          inbox_of=torch.empty_like, sendrecv=None, add=None, reduce=None):
    """A right halving and doubling among `members`, a power of two, with places to break it."""
    core, place = len(members), members.index(comm.rank)
    cut, inbox = edges(len(x), core), inbox_of(x[: -(-len(x) // 2)])
    order = distances or [1 << bit for bit in reversed(range(core.bit_length() - 1))]
    swap = sendrecv or comm.sendrecv

    def half(of, distance):
        start = of & -distance
        return x[cut[start] : cut[start + distance]]

    for distance in order:
        partner = members[place ^ distance]
        keep = half(place, distance)
        if len(inbox) < len(keep):
            inbox = inbox_of(keep)
        swap(half(place ^ distance, distance), partner, inbox[: len(keep)], partner)
        (reduce or comm.accumulate_)(keep, inbox[: len(keep)])
    for distance in (back or reversed)(order) if gather else ():
        partner = members[place ^ distance]
        into = half(place ^ distance, distance)
        swap(half(place, distance), partner, into, partner)
        if add:
            add(into, half(place, distance))


def folded(comm, x, core_part=among, *, hand_back=True, **how):
    """Rank p′ + i is folded into rank i."""
    core = 1 << comm.size.bit_length() - 1
    me, extra = comm.rank, comm.size - core
    if me >= core:
        comm.send(x, me - core)
        if hand_back:
            comm.recv(x, me - core)
        return x
    if me < extra:
        comm.recv(inbox := torch.empty_like(x), core + me)
        comm.accumulate_(x, inbox)
        del inbox
    core_part(comm, x, list(range(core)), **how)
    if me < extra and hand_back:
        comm.send(x, core + me)
    return x


# ---- right, in other styles --------------------------------------------------------------------


def by_bits_and_nearest_first(comm, x):
    """Halves of halves chosen by the bits of the rank, as in binary blocks: 1, 2, 4, … apart."""
    def core_part(comm, x, members):
        place, pieces = members.index(comm.rank), [(0, len(x))]
        inbox = torch.empty_like(x[: -(-len(x) // 2)])
        bits = range(len(members).bit_length() - 1)
        for bit in bits:
            low, high = pieces[-1]
            middle = (low + high + 1) // 2
            halves = [(low, middle), (middle, high)]
            (a, b), (c, d) = halves[place >> bit & 1], halves[1 - (place >> bit & 1)]
            partner = members[place ^ 1 << bit]
            comm.exchange(*swap(x[c:d], inbox[: b - a], partner))
            x[a:b] += inbox[: b - a]
            pieces.append((a, b))
        for bit in reversed(bits):
            (low, high), (a, b) = pieces[bit], pieces[bit + 1]
            partner = members[place ^ 1 << bit]
            c, d = (b, high) if a == low else (low, a)
            comm.exchange(*swap(x[a:b], x[c:d], partner))

    return folded(comm, x, core_part)


def swap(out, into, partner):
    from dtlab import Recv, Send

    return Send(out, partner), Recv(into, partner)


def recursively(comm, x):
    """Halving and doubling as one recursion: the way back is what follows the call."""
    def halve(members, low, high):
        if len(members) == 1:
            return
        middle, count = (low + high + 1) // 2, len(members) // 2
        place = members.index(comm.rank)
        lower = place < count
        partner = members[place + count if lower else place - count]
        keep, give = ((low, middle), (middle, high))[:: 1 if lower else -1]
        mine, yours = x[slice(*keep)], x[slice(*give)]
        inbox = torch.empty_like(mine)
        comm.sendrecv(yours, partner, inbox, partner)
        comm.accumulate_(mine, inbox)
        del inbox
        halve(members[:count] if lower else members[count:], *keep)
        comm.sendrecv(mine, partner, yours, partner)

    return folded(comm, x, lambda comm, x, members: halve(members, 0, len(x)))


@pytest.mark.parametrize("answer", [folded, by_bits_and_nearest_first, recursively])
def test_other_right_styles_get_all_points(answer):
    report = judged("halving-doubling", lambda comm, x: answer(comm, x))
    assert report.points == report.max_points == 10, str(report)


# ---- wrong -------------------------------------------------------------------------------------


def powers_of_two_only(comm, x):
    among(comm, x, list(range(comm.size)), edges=edges_of)


def leaves_the_rest_out(comm, x):
    core = 1 << comm.size.bit_length() - 1
    if comm.rank < core:
        among(comm, x, list(range(core)))


def forgets_to_hand_back(comm, x):
    folded(comm, x, hand_back=False)


def whole_vectors(comm, x, members):
    place, inbox, distance = members.index(comm.rank), torch.empty_like(x), 1
    while distance < len(members):
        partner = members[place ^ distance]
        comm.sendrecv(x, partner, inbox, partner)
        comm.accumulate_(x, inbox)
        distance *= 2


def doubles_full_vectors(comm, x):
    folded(comm, x, whole_vectors)


def nearest_first(comm, x):
    core = 1 << comm.size.bit_length() - 1
    folded(comm, x, distances=[1 << bit for bit in range(core.bit_length() - 1)])


def same_way_back(comm, x):
    folded(comm, x, back=list)


def keeps_what_it_gives(comm, x):
    def core_part(comm, x, members):
        place, (low, high) = members.index(comm.rank), (0, len(x))
        distances = [1 << bit for bit in reversed(range(len(members).bit_length() - 1))]
        for distance in distances:
            middle = (low + high + 1) // 2
            halves = [(low, middle), (middle, high)]
            if place & distance:
                halves.reverse()
            (a, b), (c, d) = halves
            inbox, partner = torch.empty_like(x[a:b]), members[place ^ distance]
            comm.sendrecv(x[c:d], partner, inbox, partner)
            x[a:b] += inbox
            low, high = c, d  # the half that has just been given away

    folded(comm, x, core_part)


def overwrites_on_the_way_there(comm, x):
    folded(comm, x, reduce=torch.Tensor.copy_)


def both_keep_the_first_half(comm, x):
    def core_part(comm, x, members):
        place, high, way = members.index(comm.rank), len(x), []
        for bit in reversed(range(len(members).bit_length() - 1)):
            middle, partner = (high + 1) // 2, members[place ^ 1 << bit]
            inbox = torch.empty_like(x[middle:high])
            comm.sendrecv(x[middle:high], partner, inbox, partner)
            x[: high - middle] += inbox
            way.append((partner, middle, high))
            high = middle
        for partner, middle, high in reversed(way):
            inbox = torch.empty_like(x[:middle])
            comm.sendrecv(x[:middle], partner, inbox, partner)
            x[middle:high] = inbox[: high - middle]

    folded(comm, x, core_part)


def hands_back_too_early(comm, x):
    def core_part(comm, x, members):
        if comm.rank + len(members) < comm.size:
            comm.send(x, comm.rank + len(members))
        among(comm, x, members)

    core = 1 << comm.size.bit_length() - 1
    folded(comm, x, core_part, hand_back=False)
    if comm.rank >= core:
        comm.recv(x, comm.rank - core)


def an_inbox_each_round(comm, x):
    kept = []

    def sendrecv(out, partner, into, _):
        kept.append(torch.empty_like(into))
        comm.sendrecv(out, partner, into, partner)

    folded(comm, x, sendrecv=sendrecv)


def no_way_back(comm, x):
    folded(comm, x, gather=False)


def adds_on_the_way_back(comm, x):
    folded(comm, x, add=lambda into, mine: into.add_(mine) if len(into) == len(mine) else None)


def drops_the_odd_element(comm, x):
    folded(comm, x, edges=lambda n, core: [c * (n // core) for c in range(core + 1)])


def small_inbox(comm, x):
    """Right halves, but room for n // 2 only."""
    folded(comm, x, inbox_of=lambda piece: _Stubborn(torch.empty_like(piece[: len(x) // 2])))


class _Stubborn:
    """An inbox that never grows: a slice of it is as long as it can be."""

    def __init__(self, room):
        self.room = room

    def __len__(self):
        return 1 << 30

    def __getitem__(self, stretch):
        return self.room[stretch]


def averages(comm, x):
    folded(comm, x)
    x /= comm.size


def a_ring(comm, x):
    solutions()["ring_all_reduce"](comm, x)


def takes_turns(comm, x):
    def one_after_the_other(out, dst, into, src):
        if comm.rank < dst:
            comm.send(out, dst)
            comm.recv(into, src)
        else:
            room = torch.empty_like(into)
            comm.recv(room, src)
            comm.send(out, dst)
            into.copy_(room)

    folded(comm, x, sendrecv=one_after_the_other)


def copies_it_all(comm, x):
    old = x.clone()
    folded(comm, x)
    return old is x or x


def float32_only(comm, x):
    folded(comm, x, inbox_of=lambda piece: torch.empty(len(piece)))


def returns_a_new_tensor(comm, x):
    return folded(comm, x.clone())


def torchs_own(comm, x):
    torch.distributed.all_reduce(x)


WRONG = [
    (powers_of_two_only, {"any p", "any n", "memory", "real"}, "powers of two only"),
    (leaves_the_rest_out, {"any p", "any n", "memory", "real"}, "fold 1 of the ranks"),
    (forgets_to_hand_back, {"any p", "any n", "memory", "real"}, "hand the sum back"),
    (doubles_full_vectors, {"bytes", "memory"}, "recursive doubling"),
    (nearest_first, ALL, "contributions are missing"),
    (same_way_back, ALL, "the nearest first"),
    (keeps_what_it_gives, ALL, "one keeps"),
    (overwrites_on_the_way_there, ALL, "Nothing has been added"),
    (both_keep_the_first_half, ALL, "one keeps the first half, the other the second"),
    (hands_back_too_early, {"any p", "any n", "memory", "real"}, "after the last round"),
    (no_way_back, ALL, "the halving is right"),
    (adds_on_the_way_back, ALL, "overwrite, don't add"),
    (drops_the_odd_element, {"any n"}, "halves differ in size"),
    (small_inbox, {"any n"}, "halves differ in size"),
    (averages, ALL, "That is the average"),
    (a_ring, {"rounds"}, "as in a ring"),
    (takes_turns, {"rounds", "memory"}, "send and receive at once"),
    (copies_it_all, {"memory"}, "largest message"),
    (an_inbox_each_round, {"memory"}, "all of x only on a rank that takes in a neighbour"),
    (float32_only, {"any dtype"}, "empty_like"),
    (returns_a_new_tensor, ALL, "in place"),
    (torchs_own, ALL, "torch.distributed isn't the communicator"),
]


@pytest.mark.parametrize(("answer", "rows", "hint"), WRONG, ids=[w[0].__name__ for w in WRONG])
def test_a_wrong_answer_loses_the_right_points_and_is_told_why(answer, rows, hint):
    report = judged("halving-doubling", answer)
    assert lost(report) == rows, str(report)
    assert any(hint in found for found in report.hints), report.hints
    assert hint in first_hint(report) or rows != ALL


def test_an_answer_fitted_to_the_shown_sizes_fails_the_hidden_test():
    def fitted(comm, x):
        shown = (0, 1, 3, 4, 5, 7, 8, 9, 10, 16, 27, 30, 32, 96_000, 1_000)
        if len(x) not in shown:
            raise ValueError("never seen")
        return folded(comm, x)

    assert judged("halving-doubling", fitted).points == 10
    assert judged("halving-doubling", fitted, seed=2).points < 5


def test_bytes_and_rounds_stand_in_the_table_against_their_bounds():
    rows = {row.name: row for row in judged("halving-doubling", doubles_full_vectors).rows}
    assert rows["bytes"].nbytes == "64 / 48"  # p = 4, 8 float32: 2 rounds of 8; 4 and 2, twice, do
    assert rows["rounds"].rounds.split(" / ")[1] == "6"  # p = 7, say: 2·2 + 2
