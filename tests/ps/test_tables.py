"""Tables: rows are placed, pulled and pushed one by one, and nothing else of them moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtlab import Comm, ps, run, simulate
from dtlab.topology import uniform
from tests.ps.shared import on_workers

VOCABULARY, WIDTH, STEPS = 50, 3, 5
PARTITIONS = [ps.Range(), ps.Hash(), ps.ConsistentHash()]


def words(worker: int, step: int) -> torch.Tensor:
    """The words of a worker's batch; some come twice."""
    numbers = torch.Generator().manual_seed(10 * worker + step)
    return torch.randint(VOCABULARY, (12,), generator=numbers)


def table() -> torch.Tensor:
    return torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(3),
                       dtype=torch.float64)


def train(comm: Comm, partition: ps.Partition, how: str, update: ps.Update) -> Any:
    node = ps.join(comm, servers=2, partition=partition, update=update)
    if node.is_server:
        return node.serve()
    node.init({"emb": table()}, tables=["emb"])
    for step in range(STEPS):
        index = words(comm.rank - 2, step)
        if how == "rows":
            rows = node.pull_rows("emb", index)
            node.push_rows("emb", index, 2 * rows)
        else:
            emb = node.pull(["emb"])["emb"].requires_grad_()
            torch.nn.functional.embedding(index, emb, sparse=how == "sparse").square().sum() \
                .backward()
            node.push({"emb": emb.grad.to_sparse() if how == "elements" else emb.grad})
        node.clock()
    last = node.pull(["emb"])["emb"]
    node.finish()
    return last


def alone(make: Any) -> torch.Tensor:
    emb = table().requires_grad_()
    optimizer = make([emb])
    for step in range(STEPS):
        optimizer.zero_grad()
        for worker in range(2):
            found = torch.nn.functional.embedding(words(worker, step), emb, sparse=True)
            (found.square().sum() / 2).backward()
        optimizer.step()
    return emb.detach()


@pytest.mark.parametrize("how", ["rows", "sparse", "dense", "elements"])
@pytest.mark.parametrize("partition", PARTITIONS, ids=repr)
def test_rows_train_as_on_one_process(partition: ps.Partition, how: str) -> None:
    result = simulate(lambda comm: train(comm, partition, how, ps.SGD(0.1)),
                      network=uniform(4, 1e-6, 1e9))
    for last in result.values[2:]:
        torch.testing.assert_close(last, alone(lambda p: torch.optim.SGD(p, lr=0.1)), rtol=0,
                                   atol=1e-12)


@pytest.mark.parametrize("how", ["rows", "sparse"])
def test_adam_leaves_rows_without_a_gradient_alone_as_sparse_adam_does(how: str) -> None:
    # Without ε, which SparseAdam adds before the bias is corrected.
    result = simulate(lambda comm: train(comm, ps.Hash(), how, ps.Adam(0.1, eps=1e-30)),
                      network=uniform(4, 1e-6, 1e9))
    wanted = alone(lambda p: torch.optim.SparseAdam(p, lr=0.1, eps=1e-30))
    for last in result.values[2:]:
        torch.testing.assert_close(last, wanted, rtol=0, atol=1e-12)


def test_rows_travel_alone() -> None:
    """5 of 10,000 rows: their bytes and their numbers, and no more."""
    @on_workers({"emb": torch.zeros(10_000, 64)}, tables=["emb"], servers=1)
    def body(node: ps.Node) -> None:
        node.pull_rows("emb", [1, 5, 77, 9_999, 5])

    server = simulate(body, network=uniform(2, 1e-6, 1e9)).values[0]
    assert server.sent_bytes == 5 * 64 * 4
    assert server.received_bytes == 10_000 * 64 * 4 + 5 * 8


def test_rows_on_processes() -> None:
    result = run(lambda comm: train(comm, ps.Hash(), "rows", ps.SGD(0.1)), ranks=4)
    for last in result.values[2:]:
        torch.testing.assert_close(last, alone(lambda p: torch.optim.SGD(p, lr=0.1)), rtol=0,
                                   atol=1e-12)
