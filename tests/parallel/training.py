"""Small training runs, on one device and on many: what the tests of dtlab.parallel compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dtlab
from dtlab.models import CNN, GPT, MLP, GPTConfig, digits, text_batch
from dtlab.parallel import DataParallel, zero

BATCH = 13  # divided by none of the numbers of ranks
STEPS = 10
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 1e-3}),
}
MODELS: dict[str, Callable[[torch.dtype], nn.Module]] = {
    "mlp": lambda dtype: MLP((64, 32, 10)).module(dtype=dtype),
    "cnn": lambda dtype: CNN(dtype=dtype),
    "gpt": lambda dtype: GPT(GPTConfig(layers=2, hidden=24, heads=4, kv_heads=2, context=8,
                                       dropout=0.1), dtype=dtype),
}
Shard = tuple[Tensor, ...]


def batch_of(model: str, step: int, dtype: torch.dtype = torch.float64, size: int = BATCH) -> Shard:
    """The whole batch of a step: inputs of the model, and targets last."""
    if model == "gpt":
        tokens, targets = text_batch(step, size, 8)
        return tokens, torch.arange(size) + 1000 * step, targets
    return digits(dtype)[0].batch(step, size)


def shard_of(batch: Shard, rank: int, ranks: int) -> Shard:
    """The part of one rank; they differ by one sample where they must."""
    return tuple(part.tensor_split(ranks)[rank] for part in batch)


def loss_of(model: nn.Module, shard: Shard) -> Tensor:
    *inputs, targets = shard
    return cross_entropy(model(*inputs).flatten(0, -2), targets.flatten())


def one_device(model: str, optimizer: str, steps: int = STEPS) -> dict[str, Tensor]:
    """The parameters after training on whole batches."""
    module = MODELS[model](torch.float64)
    make, options = OPTIMIZERS[optimizer]
    stepper = make(module.parameters(), **options)
    for step in range(steps):
        stepper.zero_grad()
        loss_of(module, batch_of(model, step)).backward()
        stepper.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def train(comm: dtlab.Comm, model: str, optimizer: str, wrap: Callable[..., Any],
          steps: int = STEPS) -> dict[str, Tensor]:
    """The same on ranks of unequal batches. wrap: (module, comm, make, options) → model, stepper.
    """
    module = MODELS[model](torch.float64).to(comm.device)
    if comm.rank:  # the others get rank 0's parameters
        for p in module.parameters():
            p.data.zero_()
    parallel, stepper = wrap(module, comm, *OPTIMIZERS[optimizer])
    for step in range(steps):
        stepper.zero_grad()
        shard = tuple(part.to(comm.device)
                      for part in shard_of(batch_of(model, step), comm.rank, comm.size))
        assert parallel.backward(loss_of(parallel, shard), len(shard[-1])) == BATCH
        stepper.step()
    return dtlab.parallel.full_state_dict(parallel)


def wrapped(comm: dtlab.Comm, stage: int, model: str = "mlp") -> Any:
    """Data parallelism (stage 0) or ZeRO, with Adam."""
    module = MODELS[model](torch.float64)
    if stage:
        return zero(module, comm, stage, torch.optim.Adam, lr=1e-3)
    return DataParallel(module, comm), torch.optim.Adam(module.parameters(), lr=1e-3)


def one_step(model: Any, optimizer: Any, step: int, kind: str = "mlp") -> None:
    """Of what `wrapped` returned."""
    shard = shard_of(batch_of(kind, step), model.comm.rank, model.comm.size)
    optimizer.zero_grad()
    model.backward(loss_of(model, shard), len(shard[-1]))
    optimizer.step()


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest one of any element."""
    assert a.keys() == b.keys()
    return max(float((a[name].cpu() - b[name].cpu()).abs().max()) for name in a)


def on(backend: str, fn: Callable[..., Any], *args: Any, ranks: int) -> dtlab.Result:
    if backend == "gloo":
        return dtlab.run(fn, *args, ranks=ranks)
    return dtlab.simulate(fn, *args, network=dtlab.topology.uniform(ranks, 1e-6, 1e9))


def refused(fn: Callable[..., Any], ranks: int = 2) -> str:
    """The sentence of the `ConfigError` that ends it, without the traceback below."""
    with pytest.raises(dtlab.RankFailed) as caught:
        on("simulator", lambda comm: fn(comm) and None, ranks=ranks)
    first = str(caught.value).splitlines()[0]
    assert "raised ConfigError" in first
    return first
