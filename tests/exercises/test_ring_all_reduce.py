"""Wrong rings: each loses the points of what it gets wrong, with a fitting hint."""

from __future__ import annotations

import pytest
import torch

from tests.exercises.answers import first_hint, judged, lost

ALL = {"sums", "any p", "any n", "any dtype", "bytes", "rounds", "memory", "real"}


def around(comm):
    return comm.size, comm.rank, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def ring(comm, x, *, gather_steps=None, first=1, cut=None, inbox_of=None, add=None, signs=(1, 1),
         sends=0):
    """A right ring, with places to break it. signs: of the steps, in either phase; sends: how far
    beside the right chunk that is which the first phase sends."""
    p, me, right, left = around(comm)
    chunks = (cut or (lambda v: v.tensor_split(p)))(x)
    inbox = (inbox_of or torch.empty_like)(chunks[0])
    for step in range(p - 1):
        arriving = chunks[(me - step * signs[0] - 1) % p]
        comm.sendrecv(chunks[(me - step * signs[0] + sends) % p], right,
                      inbox[: len(arriving)], left)
        (add or comm.accumulate_)(arriving, inbox[: len(arriving)])
    for step in range(p - 1 if gather_steps is None else gather_steps(p)):
        comm.sendrecv(chunks[(me + first - step * signs[1]) % p], right,
                      chunks[(me + first - step * signs[1] - 1) % p], left)
    return x


def overwrites_in_the_first_phase(comm, x):
    ring(comm, x, add=torch.Tensor.copy_)


def adds_before_it_waits(comm, x):
    p, me, right, left = around(comm)
    chunks = x.tensor_split(p)
    for step in range(p - 1):
        arriving = chunks[(me - step - 1) % p]
        inbox = torch.zeros_like(arriving)
        works = comm.isend(chunks[(me - step) % p], right), comm.irecv(inbox, left)
        arriving += inbox
        for work in works:
            work.wait()
    for step in range(p - 1):
        comm.sendrecv(chunks[(me + 1 - step) % p], right, chunks[(me - step) % p], left)


def sends_the_wrong_chunk(comm, x):
    ring(comm, x, sends=1)


def counts_up(comm, x):
    ring(comm, x, signs=(-1, -1))


def counts_up_in_the_first_phase(comm, x):
    ring(comm, x, signs=(-1, 1))


def counts_up_in_the_second_phase(comm, x):
    ring(comm, x, signs=(1, -1))


def cuts_pieces_of_p(comm, x):
    ring(comm, x, cut=lambda v: v.split(comm.size))


def counts_on_chunk(comm, x):
    ring(comm, x, cut=lambda v: v.chunk(comm.size))


def whole_vector_each_step(comm, x):
    _, _, right, left = around(comm)
    passing, arriving = x.clone(), torch.empty_like(x)
    for _ in range(comm.size - 1):
        comm.sendrecv(passing, right, arriving, left)
        x += arriving
        passing, arriving = arriving, passing


def relies_on_buffers(comm, x):
    p, me, right, left = around(comm)
    chunks = x.tensor_split(p)
    inbox = torch.empty_like(chunks[0])
    for step in range(p - 1):
        arriving = chunks[(me - step - 1) % p]
        comm.send(chunks[(me - step) % p], right)
        comm.recv(inbox[: len(arriving)], left)
        arriving += inbox[: len(arriving)]
    for step in range(p - 1):
        comm.send(chunks[(me + 1 - step) % p], right)
        comm.recv(chunks[(me - step) % p], left)


def powers_of_two_only(comm, x):
    p, me = comm.size, comm.rank
    right, left = (me + 1) & (p - 1), (me - 1) & (p - 1)
    chunks = x.tensor_split(p)
    inbox = torch.empty_like(chunks[0])
    for step in range(p - 1):
        arriving = chunks[(me - step - 1) % p]
        comm.sendrecv(chunks[(me - step) % p], right, inbox[: len(arriving)], left)
        arriving += inbox[: len(arriving)]
    for step in range(p - 1):
        comm.sendrecv(chunks[(me + 1 - step) % p], right, chunks[(me - step) % p], left)


def hypercube(comm, x):
    other, distance = torch.empty_like(x), 1
    while distance < comm.size:
        comm.sendrecv(x, comm.rank ^ distance, other, comm.rank ^ distance)
        x += other
        distance *= 2


def divisible_only(comm, x):
    ring(comm, x, cut=lambda v: v.view(comm.size, -1))


def forgets_the_remainder(comm, x):
    k = len(x) // comm.size
    ring(comm, x, cut=lambda v: [v[i * k : (i + 1) * k] for i in range(comm.size)])


def sum_on_one_rank(comm, x):
    if comm.rank:
        comm.send(x, 0)
        return
    for other in range(1, comm.size):
        comm.recv(inbox := torch.empty_like(x), other)
        x += inbox


def torchs_own(comm, x):
    torch.distributed.all_reduce(x)


def returns_a_new_tensor(comm, x):
    return ring(comm, x.clone())


def averages(comm, x):
    ring(comm, x)
    x /= comm.size


def copies_it_all(comm, x):
    old = x.clone()
    ring(comm, x)
    return old is x or x


def copies_to_a_list(comm, x):
    old = x.tolist()
    ring(comm, x)
    return len(old)


def copies_each_chunk(comm, x):
    p, me, right, left = around(comm)
    chunks = x.tensor_split(p)
    for step in range(p - 1):
        arriving = chunks[(me - step - 1) % p]
        inbox = torch.empty_like(arriving)
        comm.sendrecv(chunks[(me - step) % p].clone(), right, inbox, left)
        arriving += inbox
    for step in range(p - 1):
        comm.sendrecv(chunks[(me + 1 - step) % p], right, chunks[(me - step) % p], left)


def one_gather_step_too_few(comm, x):
    ring(comm, x, gather_steps=lambda p: p - 2)


def one_gather_step_too_many(comm, x):
    ring(comm, x, gather_steps=lambda p: p if p > 1 else 0)


def gathers_from_the_wrong_chunk(comm, x):
    ring(comm, x, first=0)


def no_gather(comm, x):
    ring(comm, x, gather_steps=lambda p: 0)


def adds_while_gathering(comm, x):
    p, me, right, left = around(comm)
    chunks = x.tensor_split(p)
    inbox = torch.empty_like(chunks[0])
    for step in range(2 * (p - 1)):
        arriving = chunks[(me - step - 1) % p]
        comm.sendrecv(chunks[(me - step) % p], right, inbox[: len(arriving)], left)
        arriving += inbox[: len(arriving)]


def takes_turns(comm, x):
    p, me, right, left = around(comm)
    chunks = x.tensor_split(p)
    inbox = torch.empty_like(chunks[0])

    def pass_on(out, into):
        if me % 2 == 0:
            comm.send(out, right)
            comm.recv(into, left)
        else:
            comm.recv(into, left)
            comm.send(out, right)

    for step in range(p - 1):
        arriving = chunks[(me - step - 1) % p]
        pass_on(chunks[(me - step) % p], inbox[: len(arriving)])
        arriving += inbox[: len(arriving)]
    for step in range(p - 1):
        pass_on(chunks[(me + 1 - step) % p], chunks[(me - step) % p])


def all_through_rank_0(comm, x):
    sum_on_one_rank(comm, x)
    if comm.rank:
        comm.recv(x, 0)
    else:
        for other in range(1, comm.size):
            comm.send(x, other)


def float32_only(comm, x):
    ring(comm, x, inbox_of=lambda chunk: torch.empty(len(chunk)))


def receives_into_what_it_sends(comm, x):
    _, _, right, left = around(comm)
    if comm.size > 1:
        comm.sendrecv(x, right, x, left)


def torchs_own_where_there_is_one(comm, x):
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(x)
    else:
        ring(comm, x)


WRONG = [
    (overwrites_in_the_first_phase, ALL, "Either the first phase is wrong"),
    (adds_before_it_waits, ALL, "once it has come"),
    (sends_the_wrong_chunk, ALL, "Either the first phase is wrong"),
    (counts_up, ALL, "rank r sends chunk r − s"),
    (counts_up_in_the_first_phase, ALL, "rank r sends chunk r − s"),
    (counts_up_in_the_second_phase, ALL, "which chunk do you send in step s of the all-gather?"),
    (cuts_pieces_of_p, ALL, "x.split(m) makes pieces of m elements"),
    (counts_on_chunk, {"any n"}, "x.chunk(k) may make fewer than k"),
    (whole_vector_each_step, {"bytes", "memory"}, "whole vector goes out in every step"),
    (relies_on_buffers, ALL, "use comm.sendrecv"),
    (powers_of_two_only, {"any p", "any n"}, "needs no power of two"),
    (hypercube, {"any p", "any n", "bytes", "memory"}, "needs no power of two"),
    (divisible_only, {"any n"}, "tensor_split"),
    (forgets_the_remainder, {"any n"}, "p does not divide n"),
    (sum_on_one_rank, ALL, "Only rank 0 holds the sum"),
    (torchs_own, ALL, "torch.distributed isn't the communicator"),
    (torchs_own_where_there_is_one, {"real"}, "not as a ring of real processes"),
    (returns_a_new_tensor, ALL, "in place"),
    (averages, ALL, "That is the average"),
    (copies_it_all, {"memory"}, "whole copy of x"),
    (copies_to_a_list, {"memory"}, "whole copy of x"),
    (copies_each_chunk, {"memory"}, "One inbox is enough"),
    (one_gather_step_too_few, ALL, "off-by-one"),
    (one_gather_step_too_many, {"bytes", "rounds"}, "A step too many"),
    (gathers_from_the_wrong_chunk, ALL, "all-gather"),
    (no_gather, ALL, "Each rank holds one complete chunk"),
    (adds_while_gathering, ALL, "overwrite, don't add"),
    (takes_turns, {"rounds"}, "in the same step"),
    (all_through_rank_0, {"bytes", "memory"}, "everything passes through it"),
    (float32_only, {"any dtype"}, "empty_like"),
    (receives_into_what_it_sends, ALL, "ConfigError"),
]


@pytest.mark.parametrize(("answer", "rows", "hint"), WRONG, ids=[w[0].__name__ for w in WRONG])
def test_a_wrong_answer_loses_the_right_points_and_is_told_why(answer, rows, hint):
    report = judged("ring-all-reduce", answer)
    assert lost(report) == rows, str(report)
    if hint == "ConfigError":
        assert "receives into the tensor that it is sending" in report.rows[0].came
    else:
        assert hint in first_hint(report)


def test_an_answer_fitted_to_the_shown_sizes_fails_the_hidden_test():
    def fitted(comm, x):
        if len(x) not in (0, 1, 3, 4, 5, 6, 7, 8, 10, 12, 18, 26, 27, 30, 32, 192_000, 1_000):
            raise ValueError("never seen")
        return ring(comm, x)

    assert judged("ring-all-reduce", fitted).points == 10
    assert judged("ring-all-reduce", fitted, seed=2).points < 5


def test_bytes_and_rounds_stand_in_the_table_against_their_bounds():
    rows = {row.name: row for row in judged("ring-all-reduce", whole_vector_each_step).rows}
    assert rows["bytes"].nbytes == "96 / 48"  # p = 4: 3 steps of 8 float32; 6 of 2 would do
    assert rows["rounds"].rounds.split(" / ")[1] == "24"  # p = 13
