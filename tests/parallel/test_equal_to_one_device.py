"""Data parallelism and ZeRO train as one device would, to the last bits of float64."""

from __future__ import annotations

from functools import lru_cache
from itertools import cycle
from typing import Any

import pytest
from torch import nn

import dtlab
from dtlab.parallel import DataParallel, zero
from dtlab.parallel.data import STRATEGIES
from tests.parallel.training import MODELS, OPTIMIZERS, difference, on, one_device, train

RANKS = 1, 2, 3, 4, 5, 8


class Wrap:
    """Wraps a module: with a strategy of data parallelism, or a stage of ZeRO."""

    def __init__(self, how: str | int):
        self.how = how

    def __call__(self, module: nn.Module, comm: dtlab.Comm, make: Any, options: Any) -> Any:
        if isinstance(self.how, int):
            return zero(module, comm, self.how, make, **options)
        return (DataParallel(module, comm, self.how, bucket_bytes=4000),
                make(module.parameters(), **options))


reference = lru_cache(one_device)
HOW = dict(zip(((m, o, r) for m in MODELS for o in OPTIMIZERS for r in RANKS),
               cycle((*STRATEGIES, 1, 2, 3)), strict=False))  # 7 ways, 54 cases: each meets each


def train_all(comm: dtlab.Comm, ranks: int) -> dict[tuple[str, str], Any]:
    """Train each model with each optimizer, in the ways of `HOW` for this number of ranks."""
    return {(model, optimizer): train(comm, model, optimizer, Wrap(HOW[model, optimizer, ranks]))
            for model in MODELS for optimizer in OPTIMIZERS}


@pytest.mark.parametrize(("backend", "ranks"), [
    *(("simulator", ranks) for ranks in RANKS),
    *(("gloo", ranks) for ranks in RANKS[:-1])])  # eight processes take three times as long
def test_parameters_after_ten_steps_are_those_of_one_device(backend: str, ranks: int) -> None:
    ways = 9 - ranks if backend == "simulator" and ranks in (4, 5) else ranks  # not the same again
    for states in on(backend, train_all, ways, ranks=ranks).values:
        for case, state in states.items():
            assert difference(state, reference(*case)) < 1e-12, (case, HOW[*case, ways])
