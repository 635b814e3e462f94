"""Training over a parameter server gives what it must: BSP what one process computes with the
whole batch, SSP(0) the same as BSP, SSP(∞) and λ-softsync the same as ASP."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch

import dtlab
from dtlab import Comm, ps, run, simulate
from dtlab.collectives import all_reduce
from dtlab.topology import uniform
from tests.ps.shared import on_workers

STEPS = 6
PARTITIONS = [ps.Hash(), ps.Range(), ps.ConsistentHash()]
RULES = {
    "sgd": (ps.SGD(lr=0.05), lambda p: torch.optim.SGD(p, lr=0.05)),
    "momentum": (ps.SGD(lr=0.05, momentum=0.9), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)),
    "adam": (ps.Adam(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
}


def start() -> dict[str, torch.Tensor]:
    """Three keys: a matrix, a single number, one big enough to travel alone."""
    numbers = torch.Generator().manual_seed(0)
    return {"w": torch.randn(4, 3, generator=numbers, dtype=torch.float64),
            "b": torch.randn((), generator=numbers, dtype=torch.float64),
            "big": torch.randn(9001, generator=numbers, dtype=torch.float64)}


def examples(worker: int, step: int) -> torch.Tensor:
    """A worker's batch of a step, (8, 4)."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * worker + step),
                       dtype=torch.float64)


def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The mean over a batch, of something that uses all weights."""
    return ((x @ weights["w"] + weights["b"]).tanh().square().mean()
            + (weights["big"] * x.sum()).sin().mean())


def gradients(weights: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    leaves = {key: w.clone().requires_grad_() for key, w in weights.items()}
    grads = torch.autograd.grad(loss(leaves, x), list(leaves.values()))
    return dict(zip(leaves, grads, strict=True))


def train(comm: Comm, speeds: list[float], **how: Any) -> Any:
    """A worker's last weights; worker w takes speeds[w] seconds a step."""
    node = ps.join(comm, **how)
    if node.is_server:
        return node.serve()
    worker = comm.rank - min(node.policy.workers)
    node.init(start())
    for step in range(STEPS):
        weights = node.pull(["w", "b", "big"])
        with comm.compute("step", seconds=speeds[worker]):
            grads = gradients(weights, examples(worker, step))
        node.push(grads)
        node.clock()
    last = node.pull(["big", "b", "w"])
    node.finish()
    return last


@cache
def alone(workers: int, make: Any) -> dict[str, torch.Tensor]:
    """One process, the whole batch."""
    weights = {key: w.requires_grad_() for key, w in start().items()}
    optimizer = make(list(weights.values()))
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss(weights, examples(w, step)) for w in range(workers)) / workers).backward()
        optimizer.step()
    return {key: w.detach() for key, w in weights.items()}


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for key, w in wanted.items():
        torch.testing.assert_close(found[key], w, rtol=0, atol=1e-12)


def network(ranks: int) -> dtlab.topology.Topology:
    return uniform(ranks, 5e-6, 1e9)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("partition", PARTITIONS, ids=repr)
def test_bsp_is_training_on_one_process_with_the_whole_batch(
    rule: str, servers: int, partition: ps.Partition
) -> None:
    update, make = RULES[rule]
    for workers in (1, 2, 4):
        result = simulate(lambda comm: train(comm, [0.003, 0.001, 0.002, 0.001], servers=servers,
                                             update=update, partition=partition),
                          network=network(servers + workers))
        for last in result.values[servers:]:
            assert_close(last, alone(workers, make))


@pytest.mark.parametrize("rule", RULES)
def test_on_processes_too(rule: str) -> None:
    update, make = RULES[rule]
    result = run(lambda comm: train(comm, [0, 0], servers=2, update=update, partition=ps.Range()),
                 ranks=4)
    for last in result.values[2:]:
        assert_close(last, alone(2, make))
    assert all(s.clocks == {2: STEPS, 3: STEPS} for s in result.values[:2])


@pytest.mark.parametrize("backend", ["simulator", "processes"])
def test_workers_that_serve_as_well_compute_the_same(backend: str) -> None:
    def body(comm: Comm) -> Any:
        return train(comm, [0.001, 0.003, 0.002], servers=3, colocated=True, partition=ps.Range(),
                     update=RULES["momentum"][0])

    result = (simulate(body, network=network(3)) if backend == "simulator"
              else run(body, ranks=3))
    for last in result.values:
        assert_close(last, alone(3, RULES["momentum"][1]))


SPEEDS = [0.005, 0.001, 0.0023]


def last_of(consistency: ps.Consistency, update: ps.Update) -> list[Any]:
    result = simulate(lambda comm: train(comm, SPEEDS, servers=2, consistency=consistency,
                                         update=update), network=network(5))
    return result.values[2:]


@pytest.mark.parametrize("update", [ps.SGD(0.05, momentum=0.5), ps.Adam(0.01)], ids=repr)
@pytest.mark.parametrize(("one", "other"), [
    (ps.SSP(0), ps.BSP()),
    (ps.SSP(math.inf), ps.ASP()),
    (ps.SoftSync(3), ps.ASP()),
    (ps.BackupWorkers(0), ps.BSP()),
    (ps.Quorum(1.0), ps.BSP()),
], ids=repr)
def test_the_ends_of_each_scale_meet(
    one: ps.Consistency, other: ps.Consistency, update: ps.Update
) -> None:
    for found, wanted in zip(last_of(one, update), last_of(other, update), strict=True):
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_asp_makes_an_update_of_each_push_as_it_comes() -> None:
    @on_workers({"w": torch.zeros(2)}, consistency=ps.ASP(), update=ps.SGD(lr=0.5))
    def body(node: ps.Node) -> Any:
        for _ in range(3):
            node.push({"w": torch.ones(2)})
            node.clock()
        return node.pull(["w"])["w"]

    server, *lasts = simulate(body, network=network(3)).values
    assert lasts[0].tolist() == [-3.0, -3.0]  # six steps of 0.5, none of them averaged
    assert server.updates == 6
    assert server.clocks == {1: 3, 2: 3}


def test_a_worker_reads_its_own_writes_at_once_where_clocks_overlap() -> None:
    @on_workers({"w": torch.zeros(1)}, consistency=ps.SSP(2), update=ps.SGD(lr=1.0))
    def body(node: ps.Node) -> Any:
        seen = []
        for _ in range(3):
            node.push({"w": torch.full((1,), -1.0)})
            seen.append(node.pull(["w"])["w"].item())
            node.clock()
        return seen

    for seen in simulate(body, network=network(4)).values[1:]:
        assert all(value >= step for step, value in enumerate(seen, start=1))


def test_a_pulled_tensor_and_a_pushed_one_stay_the_workers_own() -> None:
    """Neither later updates nor sums may show in what a worker holds, even without a wire."""
    def body(comm: Comm) -> Any:
        node = ps.join(comm, servers=comm.size, colocated=True, partition=ps.Range())
        node.init({"w": torch.zeros(40_000)})
        first = node.pull(["w"])["w"]
        grad = torch.ones(40_000)
        node.push({"w": grad})
        node.clock()
        second = node.pull(["w"])["w"]
        node.finish()
        return first, grad, second

    for first, grad, second in simulate(body, network=network(3)).values:
        assert torch.equal(first, torch.zeros(40_000))
        assert torch.equal(grad, torch.ones(40_000))
        torch.testing.assert_close(second, torch.full((40_000,), -0.1))


def test_an_update_does_not_show_in_what_is_on_its_way_to_another_worker() -> None:
    """Worker 2's push, which takes a second, arrives while worker 1 is being answered."""
    @on_workers({"w": torch.zeros(25_000)}, consistency=ps.ASP(), update=ps.SGD(lr=1.0))
    def body(node: ps.Node) -> Any:
        begin_s = node.comm.now()
        if node.comm.rank == 1:
            with node.comm.compute("wait", seconds=0.5):
                pass
            before = node.pull(["w"])["w"]
            answered_s = node.comm.now() - begin_s
        else:
            node.push({"w": -torch.ones(25_000)})
            answered_s, before = node.comm.now() - begin_s, torch.zeros(0)
        return answered_s, before

    (pulled_s, before), (pushed_s, _) = simulate(body, network=uniform(3, 0, 1e5)).values[1:]
    assert pushed_s < pulled_s  # else this proves nothing
    assert torch.equal(before, torch.zeros(25_000))


def test_pulls_fill_the_tensors_that_are_given() -> None:
    @on_workers({"w": torch.arange(30_000.0), "b": torch.ones(2)}, servers=2, partition=ps.Range())
    def body(node: ps.Node) -> Any:
        out = {"w": torch.zeros(30_000), "b": torch.zeros(2)}
        found = node.pull(["w", "b"], out=out)
        return found["w"] is out["w"] and found["b"] is out["b"], out

    for same, out in simulate(body, network=network(4)).values[2:]:
        assert same
        assert torch.equal(out["w"], torch.arange(30_000.0))
        assert torch.equal(out["b"], torch.ones(2))


def test_asynchronous_requests_may_be_waited_for_in_any_order() -> None:
    @on_workers({f"k{i}": torch.full((3,), float(i)) for i in range(6)}, servers=2,
                consistency=ps.ASP(), update=ps.SGD(lr=1.0))
    def body(node: ps.Node) -> Any:
        pushed = node.push_async({f"k{i}": torch.full((3,), -10.0) for i in range(6)})
        pulls = [node.pull_async([f"k{i}"]) for i in range(6)]
        found = [handle.wait() for handle in reversed(pulls)][::-1]
        pushed.wait()
        return [found[i][f"k{i}"][0].item() for i in range(6)]

    assert simulate(body, network=network(3)).values[2] == [10.0 + i for i in range(6)]


def test_a_push_without_weights_of_others_counts_as_zero_for_them() -> None:
    """Under BSP a key that one of two workers pushes moves by half of its gradient."""
    @on_workers({"w": torch.zeros(1)}, update=ps.SGD(lr=1.0))
    def body(node: ps.Node) -> Any:
        if node.comm.rank == 1:
            node.push({"w": torch.full((1,), -4.0)})
        node.clock()
        return node.pull(["w"])["w"].item()

    assert simulate(body, network=network(3)).values[1:] == [2.0, 2.0]


def test_weighted_pushes_make_a_weighted_mean() -> None:
    @on_workers({"w": torch.zeros(1)}, update=ps.SGD(lr=1.0))
    def body(node: ps.Node) -> Any:
        node.push({"w": torch.full((1,), -float(node.comm.rank))}, weight=node.comm.rank)
        node.clock()
        return node.pull(["w"])["w"].item()

    assert simulate(body, network=network(4)).values[1:] == pytest.approx([14 / 6] * 3)


def test_three_hundred_workers_in_virtual_time() -> None:
    @on_workers({"w": torch.zeros(8)}, servers=2, partition=ps.Range(), update=ps.SGD(lr=1.0))
    def body(node: ps.Node) -> Any:
        node.push({"w": torch.full((8,), -float(node.comm.rank % 2))})
        node.clock()
        return node.pull(["w"])["w"].tolist()

    result = simulate(body, network=network(302), trace=False)
    assert result.values[-1] == [0.5] * 8
    assert result.values[0].pushes == 300


@pytest.mark.parametrize("colocated", [False, True])
def test_whoever_has_finished_may_use_the_communicator_at_once(colocated: bool) -> None:
    def body(comm: Comm) -> float:
        node = ps.join(comm, servers=1 + colocated, colocated=colocated, consistency=ps.ASP())
        if node.is_server:
            node.serve()
        else:
            node.init({"w": torch.zeros(3)})
            with comm.compute("a worker that is late", seconds=comm.rank / 1000):
                pass
            node.push({"w": torch.ones(3)})
            node.clock()
            node.finish()
        return float(all_reduce(comm, torch.tensor([1.0]), algorithm="tree"))

    assert simulate(body, network=network(4)).values == [4.0] * 4
    assert run(body, ranks=3).values == [3.0] * 3
