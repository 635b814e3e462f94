"""The tensors that a stage hands on, in the containers that it returned."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dtlab.checks import short
from dtlab.errors import ConfigError
from dtlab.parallel.types import known_letters


class Form(NamedTuple):
    """The tensors without their values. places: the containers, with numbers in place of tensors.
    gradients: which of them need one. letters: their types, as `dtlab.parallel.types` knows them.
    """

    places: Any
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    gradients: list[bool]
    letters: list[dict[str, str]]

    def parts(self) -> list[tuple[torch.Size, torch.dtype, bool, dict[str, str]]]:
        """Return shape, dtype, need of a gradient and types of each tensor."""
        return list(zip(*self[1:], strict=True))

    def __str__(self) -> str:
        texts = [f"{dtype} {tuple(shape)}{'' if needs else ' without gradient'}"
                 for shape, dtype, needs, _ in self.parts()]
        return str(tree_map(texts.__getitem__, self.places)).replace("'", "")


def taken_apart(y: Any, stage: str) -> tuple[Form, list[Tensor]]:
    """The form of `y`, which `stage` has returned, and its tensors."""
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
    form = Form(places, [t.shape for t in tensors],
                [t.dtype for t in tensors], [t.requires_grad for t in tensors],
                [known_letters.get(t, {}) for t in tensors])
    return form, tensors


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
