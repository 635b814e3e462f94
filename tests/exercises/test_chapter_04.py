"""Wrong answers to the exercises of chapter 04: each loses the points of what it gets wrong."""

from __future__ import annotations

import math

import pytest
import torch

from dtlab import Recv, Send
from dtlab.grading.exercises.best_segments import TOLERANCE, best_s, chain_s
from tests.exercises.answers import first_hint, judged, lost

# ---- binomial-broadcast ------------------------------------------------------------------------

BROADCAST = {"values", "any p", "any root", "any x", "rounds", "bytes", "real"}


def lowest_bit_tree(comm, x, root, *, nearest_first=False, times=1):
    """As the library does it; with places to break it."""
    p, bit = comm.size, 1
    me = (comm.rank - root) % p
    while bit < p and not me & bit:
        bit *= 2
    if me:
        for _ in range(times):
            comm.recv(x, (me - bit + root) % p)
    below = [1 << k for k in range(bit.bit_length() - 1) if me + (1 << k) < p]
    for each in below if nearest_first else reversed(below):
        for _ in range(times):
            comm.send(x, (me + each + root) % p)
    return x


def posts_and_waits(comm, x, root):  # right as well: rank by rank halved, all by isend and irecv
    low, high = 0, comm.size
    me = (comm.rank - root) % comm.size
    while high - low > 1:
        middle = (low + high + 1) // 2
        if me == low:
            comm.isend(x, (middle + root) % comm.size).wait()
        elif me == middle:
            comm.irecv(x, (low + root) % comm.size).wait()
        low, high = (low, middle) if me < middle else (middle, high)


def flat(comm, x, root):
    if comm.rank != root:
        comm.recv(x, root)
        return
    for other in range(comm.size):
        if other != root:
            comm.send(x, other)


def nearest_child_first(comm, x, root):
    lowest_bit_tree(comm, x, root, nearest_first=True)


def farthest_first_in_the_hints_tree(comm, x, root):
    p, me = comm.size, (comm.rank - root) % comm.size
    came = me.bit_length()  # it receives in this round, counted from 1; rank 0 has x from the start
    if me:
        comm.recv(x, (me - (1 << came - 1) + root) % p)
    below = [1 << k for k in range(came, p.bit_length()) if me + (1 << k) < p]
    for each in reversed(below):
        comm.send(x, (me + each + root) % p)


def everything_twice(comm, x, root):
    lowest_bit_tree(comm, x, root, times=2)


def root_0_only(comm, x, root):
    lowest_bit_tree(comm, x, 0)


def forgets_to_turn_back(comm, x, root):
    p, distance = comm.size, 1
    me = (comm.rank - root) % p
    while distance < p:
        if me < distance and me + distance < p:
            comm.send(x, me + distance)
        elif distance <= me < 2 * distance:
            comm.recv(x, me - distance)
        distance *= 2


def no_bound(comm, x, root):
    p, distance = comm.size, 1
    me = (comm.rank - root) % p
    while distance < p:
        if me < distance:
            comm.send(x, (me + distance + root) % p)
        elif me < 2 * distance:
            comm.recv(x, (me - distance + root) % p)
        distance *= 2


def stops_at_the_largest_power_of_two(comm, x, root):
    p, distance = comm.size, 1
    me = (comm.rank - root) % p
    while 2 * distance <= p:
        if me < distance:
            comm.send(x, (me + distance + root) % p)
        elif me < 2 * distance:
            comm.recv(x, (me - distance + root) % p)
        distance *= 2


def heap(comm, x, root):
    p, me = comm.size, (comm.rank - root) % comm.size
    if me:
        comm.recv(x, ((me - 1) // 2 + root) % p)
    for child in (2 * me + 1, 2 * me + 2):
        if child < p:
            comm.send(x, (child + root) % p)


def everyone_always(comm, x, root):
    p, distance = comm.size, 1
    me = (comm.rank - root) % p
    while distance < p:
        if me + distance < p:
            comm.send(x, (me + distance + root) % p)
        if me >= distance:
            comm.recv(x, (me - distance + root) % p)
        distance *= 2


def into_a_copy(comm, x, root):
    return lowest_bit_tree(comm, x.clone(), root)


def float32_inbox(comm, x, root):
    inbox = x.clone() if comm.rank == root else torch.empty(len(x))
    lowest_bit_tree(comm, inbox, root)
    x.copy_(inbox)


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (flat, {"rounds"}, "doubles the number of ranks"),
    (nearest_child_first, {"rounds"}, "send to that one first"),
    (farthest_first_in_the_hints_tree, {"rounds"}, "in that of hint 1 the nearest"),
    (heap, {"rounds"}, "The root sends only 2 times"),
    (everyone_always, {"rounds", "bytes"}, "receives what it has already"),
    (everything_twice, {"rounds", "bytes"}, "receives what it has already"),
    (root_0_only, {"any root", "real"}, "root 0 only"),
    (forgets_to_turn_back, {"any root", "real"}, "turn back"),
    (no_bound, {"any p", "any root"}, "powers of two only"),
    (stops_at_the_largest_power_of_two, {"any p", "any root"}, "powers of two only"),
    (into_a_copy, BROADCAST, "receive into x itself"),
    (float32_inbox, {"any x"}, "dtype"),
], ids=lambda v: getattr(v, "__name__", ""))
def test_binomial_broadcast(answer, rows, hint):
    report = judged("binomial-broadcast", answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report)
    if "any p" in rows:  # which says nothing about the root
        assert "root 0 only" not in " ".join(report.hints)


# ---- pipelined-chain ---------------------------------------------------------------------------

CHAIN = {"values", "any p, root, k", "edges", "time", "bytes", "memory", "real"}


def chain(comm, x, root, segments, *, cut=None, link=None, ring=False):
    p = comm.size
    place = (comm.rank - root) % p
    ahead, behind = (comm.rank + 1) % p, (comm.rank - 1) % p
    parts = (cut or torch.tensor_split)(x, segments)
    first, last = place == 0 or p == 1, place == p - 1 and not ring
    (link or in_step)(comm, parts, None if first else behind, None if last else ahead)
    return x


def in_step(comm, parts, behind, ahead):
    for i in range(len(parts) + 1):
        ops = []
        if behind is not None and i < len(parts):
            ops.append(Recv(parts[i], behind))
        if ahead is not None and i:
            ops.append(Send(parts[i - 1], ahead))
        comm.exchange(*ops)


def one_ahead(comm, x, root, segments):  # right as well: the next receive is posted before sending
    def link(comm, parts, behind, ahead):
        coming = None if behind is None else comm.irecv(parts[0], behind)
        for i, part in enumerate(parts):
            if coming is not None:
                coming.wait()
                coming = comm.irecv(parts[i + 1], behind) if i + 1 < len(parts) else None
            if ahead is not None:
                comm.send(part, ahead)

    chain(comm, x, root, segments, link=link)


def all_at_once(comm, x, root, segments):
    def link(comm, parts, behind, ahead):
        coming = [] if behind is None else [comm.irecv(part, behind) for part in parts]
        going = []
        for i, part in enumerate(parts):
            if coming:
                coming[i].wait()
            if ahead is not None:
                going.append(comm.isend(part, ahead))
        for work in going:
            work.wait()

    chain(comm, x, root, segments, link=link)


def stores_and_forwards(comm, x, root, segments):
    def link(comm, parts, behind, ahead):
        for part in parts if behind is not None else ():
            comm.recv(part, behind)
        for part in parts if ahead is not None else ():
            comm.send(part, ahead)

    chain(comm, x, root, segments, link=link)


def takes_turns(comm, x, root, segments):
    def link(comm, parts, behind, ahead):
        for part in parts:
            if behind is not None:
                comm.recv(part, behind)
            if ahead is not None:
                comm.send(part, ahead)

    chain(comm, x, root, segments, link=link)


def one_round_too_early(comm, x, root, segments):
    def link(comm, parts, behind, ahead):
        for part in parts:
            into = [] if behind is None else [Recv(part, behind)]
            comm.exchange(*into, *([] if ahead is None else [Send(part, ahead)]))

    chain(comm, x, root, segments, link=link)


def one_round_too_early_beside_x(comm, x, root, segments):
    def link(comm, parts, behind, ahead):
        for part in parts:
            room = torch.empty_like(part)
            into = [] if behind is None else [Recv(room, behind)]
            comm.exchange(*into, *([] if ahead is None else [Send(part, ahead)]))
            if into:
                part.copy_(room)

    chain(comm, x, root, segments, link=link)


def cuts_pieces_of_that_size(comm, x, root, segments):
    chain(comm, x, root, segments, cut=lambda v, k: v.split(k))


def counts_on_chunk(comm, x, root, segments):
    chain(comm, x, root, segments, cut=lambda v, k: [v.chunk(k)[i] for i in range(k)])


def one_segment(comm, x, root, segments):
    chain(comm, x, root, 1)


def starts_at_rank_0(comm, x, root, segments):
    chain(comm, x, 0, segments)


def even_cuts_only(comm, x, root, segments):
    chain(comm, x, root, segments, cut=lambda v, k: v.view(k, -1))


def forgets_the_rest(comm, x, root, segments):
    each = len(x) // segments
    chain(comm, x, root, segments, cut=lambda v, k: [v[i * each : (i + 1) * each]
                                                     for i in range(k)])


def never_sends_the_last(comm, x, root, segments):
    chain(comm, x, root, segments, cut=lambda v, k: v.tensor_split(k)[:-1] if k > 1 else [v])


def closes_the_ring(comm, x, root, segments):
    if comm.size == 1:
        return
    p, last = comm.size, (root - 1) % comm.size
    chain(comm, x, root, segments)
    if comm.rank == last:
        comm.send(x, root)
    elif comm.rank == root:
        comm.recv(torch.empty_like(x), (root - 1) % p)


def collects_in_a_list(comm, x, root, segments):
    copies = [part.clone() for part in x.tensor_split(segments)]
    chain(comm, x, root, segments, cut=lambda v, k: copies)
    x.copy_(torch.cat(copies))


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (stores_and_forwards, {"time"}, "waits for all of x"),
    (takes_turns, {"time"}, "full duplex"),
    (one_round_too_early, CHAIN, "Send segment i − 1, which you have"),
    (one_round_too_early_beside_x, CHAIN, "while you send segment i − 1"),
    (cuts_pieces_of_that_size, {"time", "memory"}, "x.split(m) makes pieces of m elements"),
    (counts_on_chunk, {"edges"}, "x.chunk(k) may make fewer than k"),
    (one_segment, {"time"}, "single segment"),
    (all_at_once, {"time"}, "share the port"),
    (starts_at_rank_0, {"any p, root, k", "edges", "real"}, "root 0"),
    (even_cuts_only, {"any p, root, k", "edges"}, "tensor_split"),
    (forgets_the_rest, {"any p, root, k", "edges"}, "tensor_split"),
    (never_sends_the_last, CHAIN, "end of x is missing"),
    (closes_the_ring, {"time", "bytes", "memory"}, ""),
    (collects_in_a_list, {"memory"}, "views"),
], ids=lambda v: getattr(v, "__name__", ""))
def test_pipelined_chain(answer, rows, hint):
    report = judged("pipelined-chain", answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report)
    assert ("rank 0's x" in " ".join(report.hints)) <= (answer is starts_at_rank_0)


# ---- best-segments -----------------------------------------------------------------------------

BEST = {"long vectors", "short chains", "edges"}


def square_root(p, n, a, b):
    return math.sqrt((p - 2) * n * b / a)


def best_by_search(p, n, a, b):  # right as well
    k, step = 1, 1
    while chain_s(p, n, a, b, k + step) < chain_s(p, n, a, b, k):
        k, step = k + step, max(1, k // 200)
    return k


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (lambda p, n, a, b: square_root(p, n, a, b), BEST, "whole number"),
    (lambda p, n, a, b: round(square_root(p, n, a, b)), {"edges"}, "less than 1"),
    (lambda p, n, a, b: max(1, round((p - 2) * n * b / a)), BEST - {"edges"}, "square root"),
    (lambda p, n, a, b: max(1, round(math.sqrt(p * n * b / a))), {"short chains", "edges"},
     "p − 2"),
    (lambda p, n, a, b: max(1, math.ceil(square_root(p, n, a, b))), {"short chains"},
     "don't round up"),
    (lambda p, n, a, b: max(1, int(square_root(p, n, a, b))), {"short chains"}, "as int() does"),
    (lambda p, n, a, b: max(1, round(square_root(p, n, 1, b))), BEST - {"edges"}, "α missing"),
    (lambda p, n, a, b: max(1, round(math.sqrt(n * b / a))), BEST - {"short chains"},
     "number of ranks"),
    (lambda p, n, a, b: max(1, round(math.sqrt((p - 2) * a / max(n * b, 1e-30)))), BEST,
     "wrong way round"),
    (lambda p, n, a, b: max(1, int(math.sqrt((p - 1) * n * b / a))), {"edges"},
     "nothing is in between"),
    (lambda p, n, a, b: max(1, round(math.sqrt((p - 2) * (n // 4) * b / a))), BEST - {"edges"},
     "already a number of bytes"),
    (lambda p, n, a, b: 8, BEST, ""),
], ids=["float", "zero", "no root", "p", "up", "down", "no alpha", "no p", "inverted", "p - 1",
        "elements", "always 8"])
def test_best_segments(answer, rows, hint):
    report = judged("best-segments", answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report), str(report)
    assert report.points < report.max_points


@pytest.mark.parametrize("answer", [
    lambda p, n, a, b: max(1, round((p - 2) * n * b / a)),
    lambda p, n, a, b: max(1, round(math.sqrt((p - 2) * a / max(n * b, 1e-30)))),
    lambda p, n, a, b: max(1, round(math.sqrt((p - 2) * (n // 4) * b / a))),
], ids=["no root", "inverted", "elements"])
def test_a_short_chain_that_fits_two_mistakes_adds_no_second_hint(answer):
    assert len(judged("best-segments", answer).hints) == 1


@pytest.mark.parametrize(("p", "n", "alpha", "beta"), [
    (3, 100_000, 2e-5, 8e-10), (16, 10**8, 2e-5, 8e-10), (2, 10**6, 1e-6, 1e-9),
    (64, 12_345, 1e-5, 1e-9), (8, 0, 1e-5, 1e-9)])
def test_the_referees_best_is_the_best_of_all(p, n, alpha, beta):
    top = int(4 * math.sqrt(p * n * beta / alpha)) + 10
    least = min(chain_s(p, n, alpha, beta, k) for k in range(1, top))
    assert best_s(p, n, alpha, beta)[1] == pytest.approx(least, rel=TOLERANCE / 100)


# ---- right answers -----------------------------------------------------------------------------


@pytest.mark.parametrize(("exercise", "answer"), [
    ("binomial-broadcast", lowest_bit_tree), ("binomial-broadcast", posts_and_waits),
    ("pipelined-chain", chain), ("pipelined-chain", one_ahead),
    ("best-segments", best_by_search),
], ids=lambda v: getattr(v, "__name__", ""))
def test_other_right_answers_get_all_points(exercise, answer):
    report = judged(exercise, answer)
    assert report.points == report.max_points, str(report)
