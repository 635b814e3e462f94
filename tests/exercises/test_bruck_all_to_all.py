"""Wrong answers to Bruck's all-to-all, chapter 04: each loses the points of what it gets wrong."""

from __future__ import annotations

import pytest
import torch

from tests.exercises.answers import first_hint, judged, lost

BRUCK = {"values", "any p", "any parts", "rounds", "bytes", "real"}


def bruck(comm, parts, *, chosen=None, turn=None, end=None, copy=True):
    """A right one, with places to break it."""
    p, me = comm.size, comm.rank
    moving = parts.roll(-me if turn is None else turn(me), 0) if copy else parts
    hop = 1
    while hop < p:
        rows = [d for d in range(p) if d & hop] if chosen is None else chosen(p, hop)
        arriving = torch.empty_like(moving[rows])
        comm.sendrecv(moving[rows], (me + hop) % p, arriving, (me - hop) % p)
        keep = [d for d in rows if d & hop]
        moving[keep] = arriving[[rows.index(d) for d in keep]]
        hop *= 2
    return moving[[(me - s) % p for s in range(p)]] if end is None else end(moving, me, p)


def with_a_dictionary(comm, parts):  # right as well: each part travels with its name
    p, me = comm.size, comm.rank
    held = {(me, dst): parts[dst].clone() for dst in range(p)}
    hop = 1
    while hop < p:
        names = [(src, (src + d) % p) for d in range(p) if d & hop
                 for src in [(me - (d & (hop - 1))) % p]]
        arriving = [((src + hop) % p, (dst + hop) % p) for src, dst in names]
        arriving = [((src - 2 * hop) % p, (dst - 2 * hop) % p) for src, dst in arriving]
        out = torch.stack([held.pop(name) for name in names])
        into = torch.empty_like(out)
        comm.sendrecv(out, (me + hop) % p, into, (me - hop) % p)
        held.update(zip(arriving, into, strict=True))
        hop *= 2
    return torch.stack([held[src, me] for src in range(p)])


def pairwise(comm, parts):
    p, me, result = comm.size, comm.rank, parts.clone()
    for d in range(1, p):
        comm.sendrecv(parts[(me + d) % p], (me + d) % p, result[(me - d) % p], (me - d) % p)
    return result


def all_rows_each_round(comm, parts):
    return bruck(comm, parts, chosen=lambda p, hop: list(range(p)))


def gathers_everything(comm, parts):
    p, me = comm.size, comm.rank
    held, have = [parts], 1
    while have < p:
        more = min(have, p - have)
        into = torch.empty((more, *parts.shape), dtype=parts.dtype)
        comm.sendrecv(torch.stack(held[:more]), (me - have) % p, into, (me + have) % p)
        held += list(into)
        have += more
    return torch.stack([held[(s - me) % p][me] for s in range(p)])


def powers_of_two(comm, parts):
    p, me, moving, hop = comm.size, comm.rank, parts.clone(), 1
    while hop < p:
        rows = [s for s in range(p) if s & hop != me & hop]
        leaving = moving[rows]
        arriving = torch.empty_like(leaving)
        comm.sendrecv(leaving, me ^ hop, arriving, me ^ hop)
        moving[rows] = arriving
        hop *= 2
    return moving


def no_last_turn(comm, parts):
    return bruck(comm, parts, end=lambda moving, me, p: moving)


def last_turn_by_a_roll(comm, parts):
    return bruck(comm, parts, end=lambda moving, me, p: moving.roll(me, 0))


def last_turn_off_by_one(comm, parts):
    return bruck(comm, parts, end=lambda moving, me, p: moving[[(me - s + 1) % p
                                                                for s in range(p)]])


def first_turn_the_wrong_way(comm, parts):
    return bruck(comm, parts, turn=lambda me: me)


def receives_into_copied_rows(comm, parts):
    p, me = comm.size, comm.rank
    moving, hop = parts.roll(-me, 0), 1
    while hop < p:
        rows = [d for d in range(p) if d & hop]
        comm.sendrecv(moving[rows], (me + hop) % p, moving[rows], (me - hop) % p)
        hop *= 2
    return moving[[(me - s) % p for s in range(p)]]


def copies_into_copied_rows(comm, parts):
    p, me = comm.size, comm.rank
    moving, hop = parts.roll(-me, 0), 1
    while hop < p:
        rows = [d for d in range(p) if d & hop]
        arriving = torch.empty_like(moving[rows])
        comm.sendrecv(moving[rows], (me + hop) % p, arriving, (me - hop) % p)
        moving[rows].copy_(arriving)
        hop *= 2
    return moving[[(me - s) % p for s in range(p)]]


def spoils_parts(comm, parts):
    parts[:] = parts.roll(-comm.rank, 0)
    return bruck(comm, parts, copy=False)


def float32_result(comm, parts):
    return bruck(comm, parts).float()


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (pairwise, {"rounds"}, "many in one message"),
    (all_rows_each_round, {"bytes"}, "All parts leave"),
    (gathers_everything, {"bytes"}, "All parts leave"),
    (powers_of_two, {"any p"}, "powers of two only"),
    (no_last_turn, BRUCK, "Only the last turn is missing"),
    (last_turn_by_a_roll, BRUCK, "runs backwards"),
    (last_turn_off_by_one, BRUCK, "1 too far"),
    (first_turn_the_wrong_way, BRUCK, "not for this rank"),
    (receives_into_copied_rows, BRUCK, "`m[rows] = arrived`"),
    (copies_into_copied_rows, BRUCK, "`m[rows] = arrived`"),
    (spoils_parts, BRUCK, "belongs to the caller"),
    (float32_result, {"any parts"}, "dtype"),
], ids=lambda v: getattr(v, "__name__", ""))
def test_bruck_all_to_all(answer, rows, hint):
    report = judged("bruck-all-to-all", answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report), str(report)


@pytest.mark.parametrize("answer", [bruck, with_a_dictionary])
def test_other_right_answers_get_all_points(answer):
    report = judged("bruck-all-to-all", answer)
    assert report.points == report.max_points, str(report)
