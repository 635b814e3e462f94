"""Dropout without a state: which elements fall out follows from numbers alone.

torch's dropout draws from a generator, so what it drops depends on all that was drawn before, and
on how a batch or a tensor is cut. Here the element with the index i of the sample with the seed z
is dropped, or not, by a hash of (z, site, i): ranks that hold parts of a tensor drop, without a
word to each other, exactly what one device would. Idea: counter-based random numbers, Salmon et
al. 2011.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dtlab.checks import check_number
from dtlab.errors import ConfigError


def counter_dropout(x: Tensor, p: float, seeds: Tensor, site: int,
                    index: Tensor | None = None) -> Tensor:
    """x (b, …) with each element set to 0 with probability `p` in [0, 1), the others divided by
    1 − p. Raises `ConfigError` for another `p`, and unless there is a seed for each sample.

    seeds: (b,) int64, one for each sample.
    site: the number of the place in the model.
    index: the elements' int64 indices within a whole sample, of a shape that broadcasts to
    x.shape[1:]; None where `x` is whole. A rank with a part of the features gives its own.
    """
    check_probability("p", p)
    if seeds.shape != x.shape[:1]:
        raise ConfigError(f"dropout needs a seed for each sample: {tuple(x.shape[:1])} of them, "
                          f"not {tuple(seeds.shape)}")
    if index is None:
        count = math.prod(x.shape[1:])
        index = torch.arange(count, device=x.device).view(x.shape[1:])
    keys = _mixed(_mixed(seeds) + site).view(-1, *[1] * (x.dim() - 1))
    uniform = (_mixed(keys + index) & 0xFFFFFF).double() / 2**24  # in [0, 1)
    return x * (uniform >= p) / (1 - p)


class CounterDropout(nn.Module):
    """`counter_dropout` as a layer: with probability `p`, at the place number `site` of a model,
    in training. Raises `ConfigError` there if it gets no seeds.

    part: (dim, number, count) if inputs are one of `count` equal parts of samples, cut along their
    dimension `dim`: then it drops what it would drop of the whole.
    """

    def __init__(self, p: float, site: int):
        super().__init__()
        check_probability("p", p)
        self.p, self.site = p, site
        self.part: tuple[int, int, int] | None = None

    def forward(self, x: Tensor, seeds: Tensor | None) -> Tensor:
        if not (self.training and self.p):
            return x
        if seeds is None:
            raise ConfigError(f"dropout of {self.p} needs the samples' seeds in training: pass "
                              f"seeds (b,), the same on all ranks that share a sample")
        index = None
        if self.part is not None:
            dim, number, count = self.part
            whole = [size * count if d == dim else size for d, size in enumerate(x.shape[1:])]
            index = torch.arange(math.prod(whole), device=x.device).view(whole)
            index = index.narrow(dim, number * x.shape[1 + dim], x.shape[1 + dim])
        return counter_dropout(x, self.p, seeds, self.site, index)


def check_probability(name: str, p: object) -> None:
    """Raise `ConfigError` unless elements can be dropped with the probability `p`."""
    check_number(name, p)
    if not 0 <= p < 1:  # type: ignore[operator]
        raise ConfigError(f"{name} must lie in [0, 1), not {p!r}")


def _mixed(x: Tensor) -> Tensor:
    """A hash of each int64: equal everywhere, for integer arithmetic wraps round everywhere.

    Source: SplitMix64 (Steele, Lea and Flood 2014), its shifts made to fit signed numbers.
    """
    x = x * -7046029254386353131 + 1442695040888963407
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
