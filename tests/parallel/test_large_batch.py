"""LARS and LAMB take steps of the length that they promise; batches grow as steps would shrink."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dtlab
from dtlab.models import GPT, GPTConfig
from dtlab.parallel import (
    LAMB,
    LARS,
    DataParallel,
    Mesh,
    clip_grad_norm_,
    full_state_dict,
    growing_batch,
    hybrid,
    tensor,
    zero,
)
from dtlab.parallel.sharded import full_tensors
from tests.parallel.training import difference, on


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


def test_bad_numbers_are_named() -> None:
    with pytest.raises(dtlab.ConfigError, match="lr must be 0 or more"):
        LARS([weight()], lr=-1)
    for betas in ((1.0, 0.9), (-0.1, 0.9), 0.9):  # the first makes NaN of all parameters
        with pytest.raises(dtlab.ConfigError, match="betas are two numbers, 0 or more and below"):
            LAMB([weight()], betas=betas)
    with pytest.raises(dtlab.ConfigError, match="factor must be a whole number, 1 or more"):
        growing_batch(3, 16, (1,), -2)
    with pytest.raises(dtlab.ConfigError, match="a milestone must be a number, not 'a'"):
        growing_batch(3, 16, "ab", 2)


OPTIMIZERS = {"LARS": (LARS, {"lr": 0.5, "trust": 0.1, "weight_decay": 0.01}),
              "LAMB": (LAMB, {"lr": 0.05, "weight_decay": 0.1})}
CONFIG = GPTConfig(layers=2, hidden=24, heads=4, kv_heads=1, vocab=30, context=8)


def one_device(name: str, max_norm: float = math.inf
               ) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The norms of the gradients, which are clipped, and the parameters after three steps."""
    make, options = OPTIMIZERS[name]
    gpt, norms = GPT(CONFIG, dtype=torch.float64), []
    optimizer = make(gpt.parameters(), **options)
    for step in range(3):
        optimizer.zero_grad()
        tokens, targets = batch(step)
        cross_entropy(gpt(tokens).flatten(0, 1), targets.flatten()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(gpt.parameters(), max_norm)))
        optimizer.step()
    return norms, {key: p.detach() for key, p in gpt.named_parameters()}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    pieces = torch.randint(30, (12, 9), generator=torch.Generator().manual_seed(step))
    return pieces[:, :-1], pieces[:, 1:]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("axes", "stage"), [
    ({"dp": 3}, 1), ({"dp": 3}, 3), ({"tp": 2}, 0), ({"tp": 4, "dp": 2}, 2),
    ({"pp": 2, "tp": 2}, 0), ({"pp": 2, "dp": 2}, 1), ({"dp": 2}, 0)])
def test_norms_are_those_of_whole_layers(name: str, axes: dict[str, int], stage: int) -> None:
    def train(comm: dtlab.Comm) -> dict[str, torch.Tensor]:
        make, options = OPTIMIZERS[name]
        model, optimizer = hybrid(GPT(CONFIG, dtype=torch.float64), Mesh(comm, **axes),
                                  micro_batches=2, stage=stage, optimizer=make, **options)
        for step in range(3):
            optimizer.zero_grad()
            model.backward(*batch(step))
            optimizer.step()
        return full_state_dict(model)

    _, expected = one_device(name)
    for state in on("simulator", train, ranks=math.prod(axes.values())).values:
        assert difference(state, expected) < 1e-11


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_norms_of_tensor_parallel_layers_in_data_parallelism(name: str, stage: int) -> None:
    """Those of clipping, too, and those of a copy."""
    make, options = OPTIMIZERS[name]

    def train(comm: dtlab.Comm) -> Any:
        mesh = Mesh(comm, dp=2, tp=2)
        gpt = copy.deepcopy(tensor.shard(GPT(CONFIG, dtype=torch.float64), mesh["tp"]))
        model: Any
        if stage:
            model, optimizer = zero(gpt, mesh["dp"], stage, make, **options)
        else:
            model, optimizer = DataParallel(gpt, mesh["dp"]), make(gpt.parameters(), **options)
        norms = []
        for step in range(3):
            optimizer.zero_grad()
            tokens, targets = (x.chunk(2)[mesh.coordinates["dp"]] for x in batch(step))
            tensor.vocab_cross_entropy(mesh["tp"], model(tokens), targets).backward()
            norms.append(float(clip_grad_norm_(model, 0.1)))
            optimizer.step()
        with model.gathered():
            return norms, full_tensors(gpt, mesh["tp"])

    expected, whole = one_device(name, 0.1)
    for norms, state in on("simulator", train, ranks=4).values:
        assert norms == pytest.approx(expected, rel=1e-9)
        assert difference(state, whole) < 1e-11
