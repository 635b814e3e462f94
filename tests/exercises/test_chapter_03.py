"""Wrong answers to the exercises of chapter 03."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.exercises.answers import first_hint, judged, lost

FIT = {"exact times", "short messages", "long messages", "outliers"}
SHIFT = {"even circles", "odd circles", "edges", "time", "bytes"}


# ---- fit-alpha-beta ----------------------------------------------------------------------------


def robust(sizes, times):
    n = np.unique(sizes)
    t = np.array([np.median(times[sizes == size]) for size in n])
    (a, b), *_ = np.linalg.lstsq(np.stack([1 / t, n / t], 1), np.ones_like(t), rcond=None)
    return float(a), float(b)


def plain_least_squares(sizes, times):
    beta, alpha = np.polyfit(sizes, times, 1)
    return alpha, beta


def means(sizes, times):
    n = np.unique(sizes)
    t = np.array([times[sizes == size].mean() for size in n])
    (a, b), *_ = np.linalg.lstsq(np.stack([1 / t, n / t], 1), np.ones_like(t), rcond=None)
    return float(a), float(b)


def minima(sizes, times):
    n = np.unique(sizes)
    t = np.array([times[sizes == size].min() for size in n])
    (a, b), *_ = np.linalg.lstsq(np.stack([1 / t, n / t], 1), np.ones_like(t), rcond=None)
    return float(a), float(b)


def bandwidth(sizes, times):
    alpha, beta = robust(sizes, times)
    return alpha, 1 / beta


def microseconds(sizes, times):
    alpha, beta = robust(sizes, times)
    return alpha * 1e6, beta * 1e6


def bits(sizes, times):
    alpha, beta = robust(sizes, times)
    return alpha, beta / 8


def swapped(sizes, times):
    return robust(sizes, times)[::-1]


def no_alpha(sizes, times):
    return 0.0, robust(sizes, times)[1]


def one_number(sizes, times):
    return robust(sizes, times)[0]


def nans(sizes, times):
    return float("nan"), float("nan")


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (plain_least_squares, {"short messages", "outliers"}, "α is lost"),
    (means, {"outliers"}, "median"),
    (minima, {"short messages", "long messages"}, "as the minimum of each size"),
    (bandwidth, FIT, "take 1/β"),
    (microseconds, FIT, "microseconds"),
    (bits, FIT - {"short messages"}, "per bit"),
    (swapped, FIT, "wrong way round"),
    (no_alpha, FIT, "α is lost"),
    (one_number, FIT, "Return two numbers"),
    (nans, FIT, "α is lost"),
], ids=lambda v: getattr(v, "__name__", ""))
def test_fit_alpha_beta(answer, rows, hint):
    report = judged("fit-alpha-beta", answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report)


# ---- shift -------------------------------------------------------------------------------------


def sides(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def right_shift(comm, x):
    right, left = sides(comm)
    into = torch.empty_like(x)
    if comm.size == 1:
        return into.copy_(x)
    comm.sendrecv(x, right, into, left)
    return into


def posts_both(comm, x):  # right as well
    right, left = sides(comm)
    into = x.clone()
    if comm.size > 1:
        works = [comm.irecv(into, left), comm.isend(x, right)]
        for work in works:
            work.wait()
    return into


def all_send_first(comm, x):
    right, left = sides(comm)
    into = x.clone()
    if comm.size > 1:
        comm.send(x, right)
        comm.recv(into, left)
    return into


def even_ranks_first(comm, x):
    right, left = sides(comm)
    into = x.clone()
    if comm.size > 1 and comm.rank % 2 == 0:
        comm.send(x, right)
        comm.recv(into, left)
    elif comm.size > 1:
        comm.recv(into, left)
        comm.send(x, right)
    return into


def one_after_the_other(comm, x):
    right, left = sides(comm)
    into = x.clone()
    if comm.size > 1 and comm.rank == 0:
        comm.send(x, right)
        comm.recv(into, left)
    elif comm.size > 1:
        comm.recv(into, left)
        comm.send(x, right)
    return into


def wrong_way(comm, x):
    right, left = sides(comm)
    into = x.clone()
    if comm.size > 1:
        comm.sendrecv(x, left, into, right)
    return into


def reads_before_it_waits(comm, x):
    into, (right, left) = torch.full_like(x, -1), sides(comm)
    if comm.size == 1:
        return x.clone()
    works = comm.isend(x, right), comm.irecv(into, left)
    result = into.clone()
    for work in works:
        work.wait()
    return result


def forgets_the_lonely_rank(comm, x):
    right, left = sides(comm)
    into = torch.empty_like(x)
    comm.sendrecv(x, right, into, left)
    return into


def only_to_and_from_the_right(comm, x):
    into, (right, _) = x.clone(), sides(comm)
    if comm.size > 1:
        comm.sendrecv(x, right, into, right)
    return into


def passes_on_what_came(comm, x):
    into, (right, left) = x.clone(), sides(comm)
    if comm.size > 1 and comm.rank == 0:
        comm.send(into, right)
        comm.recv(into, left)
    elif comm.size > 1:
        comm.recv(into, left)
        comm.send(into, right)
    return into


def in_one_tensor(comm, x):
    right, left = sides(comm)
    comm.sendrecv(x, right, x, left)
    return x


def overwrites_x(comm, x):
    return x.copy_(right_shift(comm, x))


def float_vectors_only(comm, x):
    right, left = sides(comm)
    into = torch.empty(len(x))
    if comm.size == 1:
        return x.clone()
    comm.sendrecv(x, right, into, left)
    return into


def sends_to_everyone(comm, x):
    inboxes = [torch.empty_like(x) for _ in range(comm.size)]
    works = []
    for other in range(comm.size):
        if other != comm.rank:
            works += [comm.irecv(inboxes[other], other), comm.isend(x, other)]
    for work in works:
        work.wait()
    return inboxes[(comm.rank - 1) % comm.size] if comm.size > 1 else x.clone()


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (all_send_first, SHIFT, "use comm.sendrecv"),
    (even_ranks_first, {"time"}, "full duplex"),
    (one_after_the_other, {"time"}, "full duplex"),
    (wrong_way, {"even circles", "odd circles", "edges", "time", "bytes"}, "wrong way"),
    (reads_before_it_waits, SHIFT, "once `wait` has returned"),
    (forgets_the_lonely_rank, {"edges"}, "alone"),
    (only_to_and_from_the_right, SHIFT, "does the rank that you send to receive from you"),
    (passes_on_what_came, SHIFT, "not what it has received"),
    (in_one_tensor, SHIFT, "Receive into another one"),
    (overwrites_x, SHIFT, "belongs to the caller"),
    (float_vectors_only, {"edges"}, "any shape and dtype"),
    (sends_to_everyone, {"time", "bytes"}, "full duplex"),
], ids=lambda v: getattr(v, "__name__", ""))
def test_shift(answer, rows, hint):
    report = judged("shift", answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report)


def test_the_shift_is_timed_in_messages():
    def took(answer):
        rows = {row.name: row for row in judged("shift", answer).rows}
        return rows["time"].rounds

    assert took(even_ranks_first) == "2 / 1"
    assert took(one_after_the_other).endswith(" / 1")
    assert took(posts_both) == "1 / 1"


def test_posting_both_is_as_right_as_sendrecv():
    assert judged("shift", posts_both).points == 6
