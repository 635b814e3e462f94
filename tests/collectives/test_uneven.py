"""Parts of different sizes: against plain indexing, torch.distributed, and what they must cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

import dtlab
from dtlab import Comm, run, simulate, topology
from dtlab.collectives import (
    all_gather_object,
    all_gatherv,
    all_to_allv,
    broadcast_object,
    gather_object,
    gatherv,
    reduce_scatterv,
    scatter_object,
    scatterv,
)

ALPHA, BETA = 1e-5, 1e-9


def network(p: int) -> topology.Topology:
    return topology.uniform(p, ALPHA, 1 / BETA)


def part(src: int, dst: int, size: int) -> torch.Tensor:
    """What `src` has for `dst`."""
    return torch.arange(size) + 100 * src + 10 * dst


def all_four(comm: Comm, sizes: list[list[int]], root: int) -> list[Any]:
    """sizes[r][s]: elements that rank r has for rank s."""
    p, me = comm.size, comm.rank
    own = [row[0] for row in sizes]  # of the vector that a rank brings
    rooted = comm.rank == root
    parts = [part(me, s, sizes[me][s]) for s in range(p)]

    def empty(lengths: list[int]) -> list[torch.Tensor]:
        return [torch.full((n,), -1) for n in lengths]

    return [
        scatterv(comm, parts if rooted else None, empty(sizes[root])[me], root),
        gatherv(comm, part(me, 0, own[me]), empty(own) if rooted else None, root),
        all_gatherv(comm, part(me, 0, own[me]), empty(own)),
        all_to_allv(comm, parts, empty([sizes[s][me] for s in range(p)])),
    ]


def assert_right(values: list[Any], sizes: list[list[int]], root: int) -> None:
    p = len(sizes)
    for r, (scattered, gathered, everyones, mine) in enumerate(values):
        vectors = [part(s, 0, sizes[s][0]) for s in range(p)]
        assert torch.equal(scattered, part(root, r, sizes[root][r]))
        assert gathered is None if r != root else all(map(torch.equal, gathered, vectors))
        assert all(map(torch.equal, everyones, vectors))
        assert all(map(torch.equal, mine, [part(s, r, sizes[s][r]) for s in range(p)]))


@drawn(st.data())
def test_any_sizes_arrive_in_order(data: st.DataObject) -> None:
    p = data.draw(st.integers(1, 9))
    row = st.lists(st.integers(0, 9), min_size=p, max_size=p)
    sizes, root = data.draw(st.lists(row, min_size=p, max_size=p)), data.draw(st.integers(0, p - 1))
    assert_right(simulate(all_four, sizes, root, network=network(p)).values, sizes, root)


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_on_real_processes(p: int) -> None:
    sizes = [[(3 * r + 5 * s) % 7 for s in range(p)] for r in range(p)]
    assert_right(run(all_four, sizes, p - 1, ranks=p, trace=False).values, sizes, p - 1)


def test_torch_distributed_gives_the_same() -> None:
    def fn(comm: Comm) -> bool:
        import torch.distributed as dist

        p, me = comm.size, comm.rank
        parts = [part(me, s, me + 2 * s) for s in range(p)]
        ours, theirs = ([torch.empty(s + 2 * me, dtype=torch.int64) for s in range(p)]
                        for _ in range(2))
        received = torch.cat(theirs)
        dist.all_to_all_single(received, torch.cat(parts), [len(t) for t in theirs],
                               [len(t) for t in parts])
        return torch.equal(torch.cat(list(all_to_allv(comm, parts, ours))), received)

    assert all(run(fn, ranks=4, trace=False).values)


def test_each_takes_the_time_and_bytes_that_it_says() -> None:
    sizes = [5, 0, 9, 2, 7]
    p, b = len(sizes), [8 * n for n in sizes]

    def scatter(comm: Comm) -> None:
        parts = [torch.zeros(n, dtype=torch.int64) for n in sizes] if comm.rank == 0 else None
        scatterv(comm, parts, torch.empty(sizes[comm.rank], dtype=torch.int64))

    def gather(comm: Comm) -> None:
        into = [torch.empty(n, dtype=torch.int64) for n in sizes] if comm.rank == 0 else None
        gatherv(comm, torch.zeros(sizes[comm.rank], dtype=torch.int64), into)

    def all_gather(comm: Comm) -> None:
        into = [torch.empty(n, dtype=torch.int64) for n in sizes]
        all_gatherv(comm, torch.zeros(sizes[comm.rank], dtype=torch.int64), into)

    for fn in (scatter, gather):
        result = simulate(fn, network=network(p))
        assert math.isclose(result.elapsed_s, sum(ALPHA + n * BETA for n in b[1:]))
        assert result.trace.sent_bytes() == sum(b[1:])
    result = simulate(all_gather, network=network(p))
    assert result.elapsed_s <= (p - 1) * (ALPHA + max(b) * BETA) * (1 + 1e-9)
    assert [result.trace.sent_bytes(r) for r in range(p)] == [
        sum(b) - b[(r + 1) % p] for r in range(p)]


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8, 13])
def test_objects_and_uneven_sums_take_the_time_that_they_say(p: int) -> None:
    gamma, sizes = 5e-10, [100 + 37 * r * (r % 3) for r in range(p)]
    values = ["x" * n for n in sizes]

    def taken(fn: Callable[[Comm], object]) -> tuple[float, list[float]]:
        result = simulate(fn, network=network(p), gamma=gamma)
        return result.elapsed_s, [ALPHA + m.nbytes * BETA for m in result.trace.transfers] or [0.0]

    for call in (lambda c: gather_object(c, values[c.rank]),
                 lambda c: scatter_object(c, values if c.rank == 0 else None)):
        elapsed_s, messages_s = taken(call)
        assert math.isclose(elapsed_s, sum(messages_s))
    elapsed_s, messages_s = taken(lambda c: broadcast_object(c, "y" * 1000))
    assert math.isclose(elapsed_s, (p - 1).bit_length() * messages_s[0])
    elapsed_s, messages_s = taken(lambda c: all_gather_object(c, values[c.rank]))
    assert elapsed_s <= (p - 1) * max(messages_s) * (1 + 1e-9)
    elapsed_s, _ = taken(lambda c: reduce_scatterv(c, [torch.ones(n) for n in sizes]))
    assert elapsed_s <= (p - 1) * (ALPHA + 4 * max(sizes) * (BETA + gamma)) * (1 + 1e-9)


def test_shapes_may_differ_and_tensors_need_not_be_contiguous() -> None:
    def fn(comm: Comm) -> Any:
        grid = torch.zeros(4, 3)
        into = [torch.zeros(2, 2), grid.T[:2]]  # the second is no view of a vector
        mine = [torch.ones(2, 2), 2 * torch.ones(2, 4)][comm.rank]
        all_gatherv(comm, mine, into)
        return into

    for small, large in simulate(fn, network=network(2)).values:
        assert torch.equal(small, torch.ones(2, 2))
        assert torch.equal(large, 2 * torch.ones(2, 4))


APART = ("ShapeMismatch", "needs memory of its own")  # not in the line that a traceback quotes


def windows(shift: int) -> list[list[torch.Tensor]]:
    """Two lists of two vectors; each list begins `shift` elements behind the one before."""
    memory = torch.arange(12.0)
    return [list(memory[start : start + 6].view(2, 3)) for start in (0, shift)]


def test_neighbours_in_one_memory_and_parts_sent_twice_are_fine() -> None:
    def fn(comm: Comm) -> list[list[float]]:
        (one, _), into = windows(6)
        return [x.tolist() for x in all_to_allv(comm, [one + comm.rank] * 2, into)]

    assert simulate(fn, network=network(2)).values == [[[0.0, 1, 2], [1, 2, 3]]] * 2


@pytest.mark.parametrize(("call", "words"), [
    (lambda c: scatterv(c, [torch.ones(1)], torch.ones(1)), ("scatterv", "2 ranks", "got 1")),
    (lambda c: scatterv(c, None, torch.ones(1)), ("rank 0", "got None")),
    (lambda c: gatherv(c, torch.ones(1), None), ("gatherv", "got None")),
    (lambda c: all_gatherv(c, torch.ones(3), [torch.ones(2)] * 2), ("own part", "2", "3")),
    (lambda c: all_to_allv(c, [torch.ones(1), 3], [torch.ones(1)] * 2), ("int",)),
    (lambda c: all_to_allv(c, [torch.ones(1), torch.ones(1).int()], [torch.ones(1)] * 2),
     ("one dtype", "int32")),
    (lambda c: gatherv(c, torch.ones(1), None, root=2), ("root 2", "0 to 1")),
    (lambda c: gatherv(c, torch.ones(2), [torch.zeros(2)] * 2), APART),
    (lambda c: all_gatherv(c, torch.ones(2), [torch.zeros(2)] * 2), APART),
    (lambda c: all_to_allv(c, *[list(torch.ones(2, 3))] * 2), APART),
    (lambda c: all_to_allv(c, *windows(2)), APART),
    (lambda c: all_to_allv(c, *reversed(windows(2))), APART),
])
def test_what_does_not_fit_is_named(call: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(dtlab.DtlabError) as caught:
        simulate(lambda comm: call(comm) if comm.rank == 0 else None, network=network(2))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_size_that_the_others_did_not_expect_is_a_mismatch() -> None:
    def fn(comm: Comm) -> None:
        all_gatherv(comm, torch.ones(comm.rank + 1), [torch.ones(1), torch.ones(3 - comm.rank)])

    with pytest.raises(dtlab.ShapeMismatch):
        simulate(fn, network=network(2))
