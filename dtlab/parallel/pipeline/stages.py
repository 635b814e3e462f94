"""Cutting a model into stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from dtlab.checks import check_whole, short
from dtlab.collectives.registry import chunk_edges
from dtlab.errors import ConfigError
from dtlab.models import GPT
from dtlab.models.gpt import positions_of


class Stage(nn.ModuleList):
    """Layers one after the other: each gets what the one before returned, and the step's extras."""

    def forward(self, x: Any, *extras: Any) -> Any:
        for layer in self:
            x = layer(x, *extras)
        return x


def cut(layers: Sequence[nn.Module], stages: int | Sequence[int]) -> list[Stage]:
    """Return `layers`, cut into stages. stages: how many, whose sizes differ by at most a layer; or
    the number of layers of each.

    Raises `ConfigError` if a stage would be empty or layers would be left.
    """
    layers = list(layers) if isinstance(layers, Iterable) else [layers]
    if not all(isinstance(layer, nn.Module) for layer in layers):
        raise ConfigError(f"cut takes a list of modules, the layers, not {short(layers)}")
    if not isinstance(stages, Sequence) or isinstance(stages, str):
        check_whole("stages", stages)
        if stages > len(layers):
            raise ConfigError(f"{len(layers)} layers can't make {stages} stages")
        edges = chunk_edges(len(layers), int(stages))
    else:
        for size in stages:
            check_whole("the number of layers of a stage", size, 0)
        if sum(stages) != len(layers) or min(stages, default=0) < 1:
            raise ConfigError(f"stages of {list(stages)} layers don't make up {len(layers)} layers")
        edges = (0, *accumulate(stages))
    return [Stage(layers[first:end]) for first, end in pairwise(edges)]


class Embed(nn.Module):
    """The first layer of a GPT: tokens (b, s) → (b, s, h)."""

    def __init__(self, gpt: GPT):
        super().__init__()
        self.tokens, self.positions, self.dropout = gpt.tokens, gpt.positions, gpt.dropout

    def forward(self, tokens: Tensor, seeds: Tensor | None = None) -> Tensor:
        places = positions_of(tokens, self.positions.num_embeddings)
        x = self.tokens(tokens) + self.positions(places)
        return self.dropout(x, seeds)  # type: ignore[no-any-return]


class Head(nn.Module):
    """The last layer of a GPT: (b, s, h) → logits (b, s, v)."""

    def __init__(self, gpt: GPT):
        super().__init__()
        self.norm, self.head = gpt.norm, gpt.head
        self.tied = gpt.tokens if gpt.head is None else None

    def forward(self, x: Tensor, _seeds: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        logits: Tensor = self.head(x) if self.tied is None else x @ self.tied.weight.T
        return logits


def gpt_layers(gpt: GPT) -> list[nn.Module]:
    """The layers of `gpt`, to be cut: its embeddings, its blocks, and norm and output layer. If
    they are tied, the first and the last share a parameter: see `Pipeline`, tied."""
    if not isinstance(gpt, GPT):
        raise ConfigError(f"gpt_layers takes a dtlab.models.GPT, not {type(gpt).__name__}")
    return [Embed(gpt), *gpt.blocks, Head(gpt)]
