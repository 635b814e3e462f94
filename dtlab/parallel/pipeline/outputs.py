"""The tensors that a stage hands on, in the containers that it returned."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dtlab.checks import short
from dtlab.errors import ConfigError
from dtlab.parallel.types import known_letters


class TensorMeta(NamedTuple):
    """A tensor without its values. letters: its types, as `dtlab.parallel.types` knows them."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    letters: dict[str, str]

    def __str__(self) -> str:
        return (f"{self.dtype} {tuple(self.shape)}"
                f"{'' if self.requires_grad else ' without gradient'}")


class OutputMeta(NamedTuple):
    """The outputs of a stage without values. places: the containers, with each tensor's number."""

    places: Any
    tensors: list[TensorMeta]

    def __str__(self) -> str:
        texts = [*map(str, self.tensors)]
        return str(tree_map(texts.__getitem__, self.places)).replace("'", "")


def taken_apart(y: Any, stage: str) -> tuple[OutputMeta, list[Tensor]]:
    """Return `y`, which `stage` has returned, without values, and its tensors."""
    tensors, tree = tree_flatten(y)
    if not tensors:
        raise ConfigError(f"{stage} must return a tensor, not {short(y)}")
    for t in tensors:
        if not isinstance(t, Tensor) or t.layout != torch.strided:
            raise ConfigError(f"{stage} must return a dense tensor, or a tuple, list or dict of "
                              f"them; there is {short(t)} in what it returns")
    # One that is returned twice travels once, and is one again where it arrives.
    numbers = {t: number for number, t in enumerate(dict.fromkeys(tensors))}
    places, tensors = tree_unflatten([numbers[t] for t in tensors], tree), list(numbers)
    metas = [TensorMeta(t.shape, t.dtype, t.requires_grad, known_letters.get(t, {}))
             for t in tensors]
    return OutputMeta(places, metas), tensors


def joined(*parts: Any) -> Tensor | None:
    """Join the last stage's outputs of all micro-batches into those of the batch."""
    if parts[0] is None:
        return None
    for x in parts:
        if not isinstance(x, Tensor) or not x.dim():
            raise ConfigError(f"evaluate joins outputs along the batch, their first dimension; the "
                              f"last stage returns {short(x)}, which has none")
    return torch.cat(parts)


class Received(torch.autograd.Function):
    """`x`, which came from another stage, as a tensor that a module may change in place, as it may
    on one device. Its gradient is that of `leaf`, which takes no memory."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
