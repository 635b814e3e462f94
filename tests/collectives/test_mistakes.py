"""Calls that don't fit together end with one sentence that names both sides, never with a hang."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import dtlab
from dtlab import Comm, simulate, topology
from dtlab.collectives import (
    ALGORITHMS,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scan,
    scatter,
)
from tests import oracle


def failing(error: Any, p: int, fn: Any) -> str:  # error: one class, or some
    with pytest.raises(error) as caught:
        simulate(fn, network=topology.uniform(p, 1e-6, 1e9), echo=False)
    return str(caught.value)


def first_or_rest(one: Any, other: Any) -> Any:
    def fn(comm: Comm) -> None:
        (one if comm.rank == 0 else other)(comm, torch.ones(6))

    return fn


@pytest.mark.parametrize(("one", "other", "words"), [
    (lambda c, x: all_reduce(c, x), lambda c, x: all_reduce(c, x[:5]), ("[6]", "[5]")),
    (lambda c, x: all_reduce(c, x), lambda c, x: all_reduce(c, x.reshape(2, 3)),
     ("[6]", "[2, 3]")),
    (lambda c, x: all_reduce(c, x), lambda c, x: all_reduce(c, x.double()),
     ("float32", "float64")),
    (lambda c, x: all_reduce(c, x, "sum"), lambda c, x: all_reduce(c, x, "max"),
     ("op=sum", "op=max")),
    (lambda c, x: all_reduce(c, x, algorithm="tree"), lambda c, x: all_reduce(c, x),
     ("algorithm=tree", "algorithm=ring")),
    (lambda c, x: all_reduce(c, x.to("meta")), lambda c, x: all_reduce(c, x),
     ("meta",)),
    (lambda c, x: barrier(c), lambda c, x: all_reduce(c, x), ("barrier", "all_reduce")),
    (lambda c, x: broadcast(c, x), lambda c, x: all_reduce(c, x),
     ("rank 0 is in broadcast(", "rank 1 is in all_reduce(", "same calls")),
])
def test_unequal_calls_are_quoted_side_by_side(
    one: Any, other: Any, words: tuple[str, ...]
) -> None:
    says = failing(dtlab.ShapeMismatch, 2, first_or_rest(one, other))
    assert all(word in says for word in words), says
    assert "rank 0" in says
    assert "rank 1" in says


@pytest.mark.parametrize(("one", "other", "words"), [
    (lambda c, x: c.send(x, 1), lambda c, x: broadcast(c, x), ("0  send ", "recv in broadcast")),
    (lambda c, x: broadcast(c, x), lambda c, x: c.recv(x), ("send in broadcast", "1  recv ")),
    (lambda c, x: broadcast(c, x), lambda c, x: reduce(c, x),
     ("some are in broadcast, others in reduce",)),  # both send
])
def test_a_collective_never_meets_a_plain_message_or_another_sender(
    one: Any, other: Any, words: tuple[str, ...]
) -> None:
    says = failing(dtlab.Deadlock, 2, first_or_rest(one, other))
    assert all(word in says for word in words), says


def test_different_roots_never_pass_unnoticed() -> None:
    for collective in ("broadcast", "reduce", "scatter", "gather"):
        for algorithm in ALGORITHMS[collective]:
            for p in (2, 3, 5):
                failing(dtlab.DtlabError, p, lambda comm, c=collective, a=algorithm: oracle.call(
                    comm, c, a, torch.ones(3), root=int(comm.rank == 1)))


@pytest.mark.parametrize("p", [2, 4, 5])
def test_a_rank_that_does_not_call_is_named(p: int) -> None:
    def fn(comm: Comm) -> None:
        if comm.rank != 1:
            all_reduce(comm, torch.ones(4))

    says = failing(dtlab.Deadlock, p, fn)
    assert "1 returned without calling all_reduce" in says
    assert "in all_reduce" in says.splitlines()[2]


def test_ranks_that_have_had_their_part_of_it_are_not_blamed() -> None:
    def fn(comm: Comm) -> None:
        if comm.rank != 3:
            broadcast(comm, torch.ones(4))

    says = failing(dtlab.Deadlock, 4, fn)
    assert ": 3 returned without calling broadcast" in says  # and not 0 and 1, who did


def test_wrong_arguments_name_the_rank_and_what_would_do() -> None:
    for call, words in (
        (lambda c: all_reduce(c, 1.0), ("rank 0", "float", "torch.tensor")),
        (lambda c: all_reduce(c, torch.ones(2).to_sparse()), ("rank 0", "dense")),
        (lambda c: all_reduce(c, torch.ones(1).expand(4)), ("rank 0", "expand")),
        (lambda c: reduce(c, torch.ones(1).expand(4)), ("rank 0", "expand")),
        (lambda c: broadcast(c, torch.ones(1).expand(4), root=1), ("rank 0", "expand")),
        (lambda c: broadcast(c, torch.ones(2), root=-1), ("rank 0", "root -1", "0 to 1")),
        (lambda c: broadcast(c, torch.ones(2), root=True), ("root True",)),
        (lambda c: reduce(c, torch.ones(2), op="median"), ("median", "sum", "function")),
        (lambda c: broadcast(c, torch.ones(2), algorithm="ring"), ("ring", "flat", "binomial")),
        (lambda c: barrier(c, "star"), ("star", "dissemination")),
        *((lambda c, algorithm=algorithm: all_reduce(c, torch.ones(2), algorithm=algorithm),
           ("there is no all_reduce algorithm", "ring"))
          for algorithm in (["ring"], None, 3)),
        (lambda c: scatter(c, None, torch.ones(2)), ("rank 0", "tensor", "None")),
        (lambda c: scatter(c, [torch.ones(2)] * 2, torch.ones(2)), ("rank 0", "tensor", "list")),
        (lambda c: scatter(c, torch.ones(3, 2), torch.ones(2)), ("rank 0", "(2, …)", "(3, 2)")),
        (lambda c: scatter(c, torch.ones(2, 3), torch.ones(2)), ("parts like x", "(3,)", "(2,)")),
        (lambda c: all_to_all(c, torch.ones(())), ("rank 0", "all_to_all", "a part for each")),
        (lambda c: reduce_scatter(c, torch.ones(2, dtype=torch.int64), "avg"), ("'avg'", "int64")),
        (lambda c: gather(c, torch.ones(2), root=2), ("root 2", "0 to 1")),
        (lambda c: scan(c, [1.0, 2.0]), ("rank 0", "list", "torch.tensor")),
        (lambda c: c.recv(torch.ones(1).expand(4), 1), ("rank 0", "share memory")),
        (lambda c: c.send(torch.ones(2).to_sparse(), 1), ("rank 0", "dense")),
    ):
        says = failing((dtlab.ConfigError, dtlab.ShapeMismatch), 2, lambda comm, call=call: (
            call(comm) if comm.rank == 0 else None))
        assert all(word in says for word in words), says


def test_nothing_is_lost_after_a_mistake() -> None:
    failing(dtlab.DtlabError, 2, lambda comm: all_reduce(comm, torch.ones(comm.rank)))
    values = simulate(lambda comm: all_reduce(comm, torch.ones(2)).tolist(),
                      network=topology.uniform(2, 1e-6, 1e9)).values
    assert values == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("how", ["greenlet", "thread", "process"])
def test_a_deadlock_in_a_finally_block_names_the_error_before_it(how: str) -> None:
    def fn(comm: Comm) -> None:
        x = torch.ones(3)
        try:
            if comm.rank == 1:
                raise ValueError("the file is broken")
            comm.recv(x, 1)
        finally:
            barrier(comm)

    call = partial(dtlab.run, ranks=3) if how == "process" else partial(
        simulate, network=topology.uniform(3, 1e-6, 1e9), strands=how)
    with pytest.raises(dtlab.Deadlock) as caught:
        call(fn)
    lines = [row.line for row in caught.value.waiting]
    assert lines[1].endswith("in fn, after ValueError: the file is broken"), lines
    assert not any("after" in line for line in (lines[0], lines[2]))
