"""LARS and LAMB take steps of the length that they promise; batches grow as steps would shrink."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dtlab
from dtlab.models import MLP, digits
from dtlab.parallel import LAMB, LARS, DataParallel, growing_batch
from tests.parallel.training import on, shard_of


def weight(seed: int = 0) -> nn.Parameter:
    random = torch.Generator().manual_seed(seed)
    w = nn.Parameter(torch.randn(5, 4, generator=random, dtype=torch.float64))
    w.grad = torch.randn(5, 4, generator=random, dtype=torch.float64)
    return w


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_first_step_is_in_proportion_to_the_weights_whatever_the_gradient(scale: float) -> None:
    for make, length in ((lambda p: LARS(p, lr=0.2, trust=0.01), 0.2 * 0.01),
                         (lambda p: LAMB(p, lr=0.03, eps=0, weight_decay=0), 0.03)):
        w = weight()
        assert w.grad is not None
        w.grad *= scale
        before = w.detach().clone()
        make([w]).step()
        assert float((w.detach() - before).norm() / before.norm()) == pytest.approx(length)


def test_five_steps_of_lars_by_hand() -> None:
    w, hand = weight(1), weight(1).detach().clone()
    optimizer, v = LARS([w], lr=0.5, momentum=0.8, trust=0.1, weight_decay=0.01), 0
    for step in range(5):
        g = torch.sin(torch.arange(20.0, dtype=torch.float64).view(5, 4) + step)
        w.grad = g.clone()
        optimizer.step()
        g = g + 0.01 * hand
        v = 0.8 * v + 0.5 * 0.1 * hand.norm() / g.norm() * g
        hand = hand - v
        torch.testing.assert_close(w.detach(), hand)


def test_lamb_is_adamw_with_another_length() -> None:
    w, theirs = weight(2), weight(2)
    ours = LAMB([w], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0)
    adam = torch.optim.Adam([theirs], lr=1.0, betas=(0.8, 0.9), eps=1e-6)
    for step in range(5):
        before = w.detach().clone()
        theirs.data = before.clone()
        w.grad = theirs.grad = torch.sin(
            torch.arange(20.0, dtype=torch.float64).view(5, 4) + step)
        ours.step()
        adam.step()
        direction = before - theirs.detach()
        torch.testing.assert_close(
            w.detach(), before - 0.1 * before.norm() / direction.norm() * direction)


def test_biases_take_the_plain_step() -> None:
    for make, plain in ((lambda p: LARS(p, lr=0.1, momentum=0.9, weight_decay=0.5),
                         lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
                        (lambda p: LAMB(p, lr=0.1, weight_decay=0.5),
                         lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-6))):
        ours, theirs = (nn.Parameter(torch.arange(3.0, dtype=torch.float64)) for _ in range(2))
        first, second = make([ours]), plain([theirs])
        for step in range(4):
            ours.grad = theirs.grad = torch.tensor([1.0, -2, 3], dtype=torch.float64) * (step + 1)
            first.step()
            second.step()
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("make", [LARS, LAMB])
def test_ranks_that_share_a_large_batch_train_as_one_device(make: Any) -> None:
    def train(comm: dtlab.Comm | None) -> list[torch.Tensor]:
        module = MLP((64, 16, 10)).module(dtype=torch.float64)
        model: Any = module if comm is None else DataParallel(module, comm)
        optimizer = make(module.parameters(), lr=0.01)
        for step in range(4):
            size = growing_batch(step, 24, (2,), 5)
            batch = digits(torch.float64)[0].batch(step, size)
            x, y = batch if comm is None else shard_of(batch, comm.rank, comm.size)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        return [p.detach() for p in module.parameters()]

    for values in on("simulator", train, ranks=4).values:
        for ours, one in zip(values, train(None), strict=True):
            torch.testing.assert_close(ours, one, rtol=0, atol=1e-12)


def test_zero_refuses_what_needs_whole_layers_and_bad_numbers_are_named() -> None:
    with pytest.raises(dtlab.RankFailed, match="LAMB needs the norms of whole layers"):
        on("simulator", lambda comm: dtlab.parallel.zero(nn.Linear(2, 2), comm, 1, LAMB), ranks=2)
    with pytest.raises(dtlab.ConfigError, match="lr must be a number of at least 0"):
        LARS([weight()], lr=-1)
