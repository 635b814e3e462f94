"""Ranks that communicate inside autograd's backward."""

from __future__ import annotations

import gc

import pytest
import torch

import dtlab
from dtlab.simulator.engine import Engine

NETWORK = dtlab.topology.uniform(3, 1e-6, 1e9)


def sum_gradient(comm: dtlab.Comm, p: torch.Tensor) -> None:
    dtlab.collectives.all_reduce(comm, p.grad)


def gradient_averaged_by_a_hook(comm: dtlab.Comm) -> float:
    print("before backward")
    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda p: sum_gradient(comm, p))
    (x * comm.rank).sum().backward()
    print("after backward")
    return float(x.grad[0])


def test_ranks_that_communicate_inside_backward_begin_again_as_threads(
        capsys: pytest.CaptureFixture[str]) -> None:
    def fn(comm: dtlab.Comm) -> float:
        return gradient_averaged_by_a_hook(comm)

    result = dtlab.simulate(fn, network=NETWORK)
    assert result.values == [3.0, 3.0, 3.0]
    assert result.output == ["before backward\nafter backward\n"] * 3
    shown = capsys.readouterr().out.splitlines()
    assert sorted(shown) == sorted(f"[rank {r}] {when} backward" for r in range(3)
                                   for when in ("before", "after"))  # each line once
    again = dtlab.simulate(fn, network=NETWORK, strands="thread", echo=False)
    assert (again.elapsed_s, again.trace.events) == (result.elapsed_s, result.trace.events)


def test_what_began_again_leaves_nothing_behind() -> None:
    def engines() -> int:
        gc.collect()
        return sum(type(x) is Engine for x in gc.get_objects())

    before = engines()  # of other tests
    for _ in range(3):
        dtlab.simulate(gradient_averaged_by_a_hook, network=NETWORK, echo=False)
    assert engines() < before + 2


def test_greenlets_that_were_asked_for_refuse() -> None:
    with pytest.raises(dtlab.ConfigError, match='strands="thread"'):
        dtlab.simulate(gradient_averaged_by_a_hook, network=NETWORK, strands="greenlet",
                       echo=False)


def test_a_mode_of_one_rank_is_not_active_on_the_others() -> None:
    def fn(comm: dtlab.Comm) -> str:
        x = torch.zeros(1)
        if comm.rank == 0:
            with torch.device("meta"):
                comm.recv(x, 1)
        elif comm.rank == 1:
            comm.recv(x, 2)
            comm.send(x, 0)
        else:
            comm.send(x, 1)
        return torch.zeros(1).device.type

    assert dtlab.simulate(fn, network=NETWORK).values == ["cpu"] * 3


def test_hooks_on_saved_tensors_of_one_rank_see_none_of_the_others() -> None:
    def fn(comm: dtlab.Comm) -> tuple[int, int]:
        seen = []
        w = torch.full((2,), float(comm.rank), requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
            dtlab.collectives.barrier(comm)
            if comm.rank:
                w.square()
        dtlab.collectives.barrier(comm)
        w.square()
        return len(seen), int(all(x is w or x.equal(w) for x in seen))

    assert dtlab.simulate(fn, network=NETWORK).values == [(0, 1), (1, 1), (1, 1)]
