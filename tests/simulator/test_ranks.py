"""What a simulated rank has to itself, and what becomes of it when something goes wrong."""

from __future__ import annotations

import random
from random import shuffle
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import permutation
from torch import default_generator

import dtlab
from dtlab import Comm, run, simulate, topology
from dtlab.collectives import all_reduce, broadcast, reduce
from tests.simulator.shared import Shared


def net(p: int) -> topology.Topology:
    return topology.uniform(p, 1e-6, 1e9)


@pytest.mark.parametrize("strands", ["greenlet", "thread"])
def test_a_rank_that_raises_is_named_and_the_others_clean_up(strands: str) -> None:
    log = Shared()

    def fn(comm: Comm) -> None:
        if comm.rank == 1:
            raise KeyError("lost")
        try:
            comm.recv(torch.ones(1), 1)
        finally:
            log.append(comm.rank)

    with pytest.raises(dtlab.RankFailed, match="lost") as caught:
        simulate(fn, network=net(3), strands=strands)
    assert caught.value.rank == 1
    assert 'raise KeyError("lost")' in caught.value.traceback_text
    assert isinstance(caught.value.__cause__, KeyError)
    assert sorted(log) in ([0], [0, 2])  # rank 2 may never have begun


def test_an_interrupt_in_a_rank_is_the_callers() -> None:
    def interrupted(comm: Comm) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(interrupted, network=net(2))
    assert simulate(lambda comm: comm.rank, network=net(2)).values == [0, 1]


@pytest.mark.parametrize(("fn", "says"), [
    (lambda comm: comm.send(torch.ones(1), comm.rank), "itself"),
    (lambda comm: comm.send(torch.ones(1), 2), "0 to 1"),
    (lambda comm: comm.recv(torch.ones(1), -1), "0 to 1"),
    (lambda comm: comm.send(torch.ones(1), 0.5), "rank is an int"),
    (lambda comm: comm.recv("nowhere", 1 - comm.rank), "tensor"),
    (lambda comm: all_reduce(comm, torch.ones(4), algorithm="rign"), "flat, tree, ring"),
    (lambda comm: all_reduce(comm, torch.ones(4), op="mean"), "sum, avg"),
    (lambda comm: all_reduce(comm, [1.0]), "takes a tensor"),
    (lambda comm: all_reduce(comm, torch.ones(2, dtype=torch.int32), op="avg"), "avg"),
    (lambda comm: all_reduce(comm, torch.ones(2, dtype=torch.complex64), op="max"), "no order"),
    (lambda comm: broadcast(comm, torch.ones(4), root=2), "no root 2"),
])
def test_arguments_that_make_no_sense_get_one_sentence(fn: Any, says: str) -> None:
    with pytest.raises(dtlab.ConfigError, match=says):
        simulate(fn, network=net(2))


@pytest.mark.parametrize("bad", [
    (0, 1, 1), (-1, 1, 1), (2.5, 1, 1), (True, 1, 1), (2, -1, 1), (2, float("inf"), 1),
    (2, float("nan"), 1), (2, 1, 0), (2, 1, -5), (2, 1, float("nan")), (2, "1", 1),
])
def test_a_uniform_network_of_nonsense_is_refused(bad: tuple[Any, Any, Any]) -> None:
    with pytest.raises(dtlab.ConfigError):
        topology.uniform(*bad)


def test_mismatched_messages_name_both_sides() -> None:
    def shapes(comm: Comm) -> None:
        comm.send(torch.ones(3), 1) if comm.rank == 0 else comm.recv(torch.ones(4), 0)

    with pytest.raises(dtlab.ShapeMismatch, match=r"rank 0 sent float32 \(3,\).*rank 1.*\(4,\)"):
        simulate(shapes, network=net(2))
    with pytest.raises(dtlab.ShapeMismatch, match=r"\[4\].*\[5\]|\[5\].*\[4\]"):
        simulate(lambda comm: all_reduce(comm, torch.ones(4 + comm.rank)), network=net(2))
    with pytest.raises(dtlab.ShapeMismatch, match=r"op=sum.*op=max|op=max.*op=sum"):
        simulate(lambda comm: all_reduce(comm, torch.ones(4), op=("sum", "max")[comm.rank]),
                 network=net(2))


def test_different_collectives_never_pass_for_each_other() -> None:
    def fn(comm: Comm) -> None:
        x = torch.ones(4)
        broadcast(comm, x) if comm.rank == 0 else reduce(comm, x)

    with pytest.raises(dtlab.DtlabError):  # both send: a deadlock; else labels differ
        simulate(fn, network=net(2))


def test_random_numbers_are_those_of_separate_processes() -> None:
    def seeded(comm: Comm) -> list[Any]:
        torch.manual_seed(comm.rank)
        random.seed(comm.rank)
        np.random.seed(comm.rank)
        drawn = []
        for _ in range(3):
            order = [1, 2, 3, 4, 5]
            shuffle(order)
            drawn += [torch.rand(1).item(), torch.rand(1, generator=default_generator).item(),
                      random.random(), order, np.random.rand(), permutation(5).tolist()]
            comm.exchange(dtlab.Send(torch.ones(1), (comm.rank + 1) % comm.size),
                          dtlab.Recv(torch.ones(1), (comm.rank - 1) % comm.size))
        return drawn

    def unseeded(comm: Comm) -> list[float]:
        return [torch.rand(1).item(), random.random(), np.random.rand()]

    random.seed(5)
    np.random.seed(5)
    np.random.randn()  # makes two
    before = torch.default_generator.get_state(), random.getstate()
    simulated = simulate(seeded, network=net(3)).values
    first = simulate(unseeded, network=net(3)).values
    assert torch.equal(torch.default_generator.get_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.randn() == np.random.RandomState(5).randn(2)[1]
    assert simulated == run(seeded, ranks=3).values
    assert first == simulate(unseeded, network=net(3)).values
    assert len({number for drawn in first for number in drawn}) == 9


class Exchanged(torch.autograd.Function):
    """Identity forwards; backwards, the gradients of the two ranks are added."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, x: torch.Tensor) -> torch.Tensor:
        ctx.comm = comm
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, all_reduce(ctx.comm, grad.clone())


def test_thread_strands_communicate_inside_backward() -> None:
    def fn(comm: Comm) -> float:
        x = torch.tensor([1.0], requires_grad=True)
        (Exchanged.apply(comm, x) * (comm.rank + 1)).sum().backward()
        assert x.grad is not None
        return x.grad.item()

    assert simulate(fn, network=net(3), strands="thread").values == [6.0, 6.0, 6.0]


def test_prints_come_back_by_rank_and_labelled(capsys: pytest.CaptureFixture[str]) -> None:
    def fn(comm: Comm) -> None:
        print("hello", comm.rank)
        print("bar 1%", "\rbar 100%", end="\n")
        print("no newline", end="")

    result = simulate(fn, network=net(2))
    assert result.output == [f"hello {r}\nbar 100%\nno newline\n" for r in range(2)]
    assert "[rank 1] hello 1\n" in capsys.readouterr().out


def test_a_simulation_that_never_ends_is_stopped() -> None:
    def fn(comm: Comm) -> None:
        while True:
            comm.sendrecv(torch.ones(1), 1 - comm.rank, torch.ones(1), 1 - comm.rank)

    with pytest.raises(dtlab.RunTimeout):
        simulate(fn, network=net(2), timeout=0.2)


def test_a_function_that_cannot_take_the_call_is_refused_before_it_starts() -> None:
    def hello(comm: Comm) -> None:
        """Takes nothing but the communicator."""

    with pytest.raises(dtlab.ConfigError, match=r"hello\(comm, 4\).*ranks=4"):
        run(hello, 4)
    with pytest.raises(dtlab.ConfigError, match=r"defined as <lambda>\(\)"):
        simulate(lambda: 1, network=net(2))
    with pytest.raises(dtlab.ConfigError, match="has a `yield`"):
        simulate(lambda comm: (yield 1), network=net(2))


@pytest.mark.parametrize("strands", ["greenlet", "thread"])
def test_a_rank_computes_with_one_thread_and_the_caller_gets_back_its_own(strands: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        result = simulate(lambda comm: torch.get_num_threads(), network=net(2), strands=strands)
        with pytest.raises(dtlab.RankFailed, match="on purpose"):
            simulate(fails, network=net(2), strands=strands)
        assert (result.values, torch.get_num_threads()) == ([1, 1], 3)
    finally:
        torch.set_num_threads(before)


def fails(comm: Comm) -> None:
    raise ValueError("on purpose")
