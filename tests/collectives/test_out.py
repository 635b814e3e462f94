"""Collectives that write their result where the caller wants it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtlab import Comm, RankFailed, ShapeMismatch, collectives, run, simulate
from dtlab.collectives import ALGORITHMS
from dtlab.topology import uniform

PAIRS = [(collective, name) for collective in ("all_gather", "gather", "all_to_all")
         for name in ALGORITHMS[collective]]


def filled(comm: Comm, collective: str, name: str, n: int) -> bool:
    """Does the result stand in `out`, and equal the one without `out`?"""
    shape = (comm.size, n) if collective == "all_to_all" else (n,)
    x = torch.arange(float(n)).expand(shape) * 10 + comm.rank
    function = getattr(collectives, collective)
    out = torch.full((comm.size, n), -1.0)
    returned = function(comm, x.clone(), algorithm=name, out=out)
    if collective == "gather" and comm.rank:
        return returned is None and function(comm, x.clone(), algorithm=name) is None
    return (returned.data_ptr() == out.data_ptr() or not n) and torch.equal(
        out, function(comm, x.clone(), algorithm=name))


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("collective", "name"), PAIRS)
def test_the_result_stands_in_out(collective: str, name: str, p: int) -> None:
    for n in (0, 1, 7):
        assert all(simulate(filled, collective, name, n, network=uniform(p, 1e-6, 1e9)).values)


def test_the_result_stands_in_out_on_processes() -> None:
    def work(comm: Comm) -> list[tuple[str, str]]:
        return [pair for pair in PAIRS if not filled(comm, *pair, 7)]

    assert run(work, ranks=3).values == [[], [], []]


@pytest.mark.parametrize(("out", "words"), [
    (torch.zeros(3, 4), "needs an out of torch.float32"),
    (torch.zeros(2, 4, dtype=torch.float64), "needs an out of torch.float32"),
    (torch.zeros(4, 2).T, "without gaps"),
    (torch.zeros(4).expand(2, 4), "share memory"),
])
def test_an_out_that_does_not_fit_is_refused(out: torch.Tensor, words: str) -> None:
    with pytest.raises(RankFailed, match=words) as caught:
        simulate(lambda comm: collectives.all_gather(comm, torch.ones(4), out=out),
                 network=uniform(2, 1e-6, 1e9))
    assert isinstance(caught.value, ShapeMismatch)


@pytest.mark.parametrize("name", ALGORITHMS["all_gather"])
def test_all_gather_in_place(name: str) -> None:
    def work(comm: Comm) -> list[float]:
        out = torch.zeros(comm.size, 2)
        mine = out[comm.rank].fill_(comm.rank + 1.0)
        return collectives.all_gather(comm, mine, algorithm=name, out=out)[:, 0].tolist()

    assert simulate(work, network=uniform(3, 1e-6, 1e9)).values == [[1.0, 2.0, 3.0]] * 3


def test_a_row_of_another_rank_and_all_that_is_read_are_no_place() -> None:
    def another_row(comm: Comm, out: torch.Tensor) -> None:
        collectives.all_gather(comm, out[comm.rank - 1], out=out)

    def all_rows(comm: Comm, out: torch.Tensor) -> None:
        collectives.all_to_all(comm, out, out=out)

    for fn in (another_row, all_rows):
        with pytest.raises(RankFailed, match="memory of its own"):
            simulate(fn, torch.zeros(3, 2), network=uniform(3, 1e-6, 1e9))


@pytest.mark.parametrize("halves", [
    lambda both: (both[0], both[1]), lambda both: (both[1], both[0]),
    lambda both: (both.view(6, 4)[0:3].mT.contiguous().mT, both[0]),  # strided, elsewhere
])
def test_two_halves_of_one_tensor_are_two_memories(halves: Any) -> None:
    def work(comm: Comm) -> list[float]:
        parts, out = halves(torch.zeros(2, 3, 4))
        parts.copy_(torch.arange(3.0)[:, None] + 10 * comm.rank)
        return collectives.all_to_all(comm, parts, out=out)[:, 3].tolist()

    values = simulate(work, network=uniform(3, 1e-6, 1e9)).values
    assert values == [[rank, rank + 10.0, rank + 20.0] for rank in range(3)]


@pytest.mark.parametrize("shift", [-8, -1, 1, 7, 8])
def test_a_result_that_begins_or_ends_in_its_input_is_refused(shift: int) -> None:
    def work(comm: Comm) -> None:
        memory = torch.zeros(32)
        strided = memory[8 : 8 + 9].view(3, 3)[:, :2]  # ends one element before its memory does
        collectives.all_to_all(comm, strided, out=memory[8 + shift :][: 3 * 2].view(3, 2))

    if abs(shift) == 8:
        simulate(work, network=uniform(3, 1e-6, 1e9))
    else:
        with pytest.raises(RankFailed, match="memory of its own"):
            simulate(work, network=uniform(3, 1e-6, 1e9))


def test_a_reduce_scatter_that_overwrites_returns_its_row_of_parts_however_they_lie() -> None:
    def fn(comm: Comm) -> bool:
        parts = torch.ones(4, 3, 2).transpose(1, 2)  # no view of it is a matrix of rows
        mine = collectives.reduce_scatter(comm, parts, "avg", overwrite=True)
        return mine.data_ptr() == parts[comm.rank].data_ptr() and bool((mine == 1).all())

    assert simulate(fn, network=uniform(4, 0, 1e9)).values == [True] * 4
