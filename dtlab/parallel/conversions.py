"""Conversions of tensors where they enter or leave a group of ranks that share a layer.

Each of these is a pair: what moves forward, and what moves backward, which is its transpose. The
first two are Megatron's f and g, *conjugate*: each is the other's backward.

| function          | forward                 | backward                | types |
|-------------------|-------------------------|-------------------------|-------|
| copy_to           | nothing moves           | all-reduce              | I → R |
| reduce_from       | all-reduce              | nothing moves           | P → I |
| gather_from       | all-gather              | reduce-scatter          | V → R |
| reduce_scatter_to | reduce-scatter          | all-gather              | P → V |
| scatter_to        | keep this rank's part   | all-gather              | I → V |
| gather_invariant  | all-gather              | keep this rank's part   | V → I |

The types are those of `dtlab.parallel.types`. Source: Shoeybi et al. 2019 (Megatron-LM), §3;
Korthikanti et al. 2022, §4.2. Chapter: 11.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

from dtlab.collectives import all_gather, all_reduce, reduce_scatter
from dtlab.comm import Comm
from dtlab.errors import ConfigError, ShapeMismatch
from dtlab.parallel.types import INVARIANT, PARTIAL, REPLICATED, VARYING, conversion

Move = Callable[[Tensor], Tensor]
SEQUENCE = -2  # the dimension of positions in (b, s, h)


class _Pair(torch.autograd.Function):
    """`forward` forward, `backward` backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Move, backward: Move) -> Tensor:
        ctx.moves = backward, forward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return pair(gradient, *ctx.moves), None, None  # each is the other's backward


def pair(x: Tensor, forward: Move, backward: Move) -> Tensor:
    """`forward(x)`, of which `backward`, its transpose, computes the gradient."""
    refuse_torch_func()
    y: Tensor = _Pair.apply(x, forward, backward)
    return y


def refuse_torch_func() -> None:
    """Raise `ConfigError` within torch.func, whose transforms would have to send messages."""
    if retrieve_all_functorch_interpreters():
        raise ConfigError("torch.func can't transform what ranks send each other; differentiate "
                          "with torch.autograd, such as torch.autograd.functional")


# ---- the four moves ------------------------------------------------------------------------------


def summed(comm: Comm, x: Tensor) -> Tensor:
    """The sum over all ranks, in new memory. Cost: an all-reduce of x."""
    return all_reduce(comm, x.detach().clone(memory_format=torch.contiguous_format))


def part(comm: Comm, x: Tensor, dim: int) -> Tensor:
    """This rank's part of `x`, cut along `dim`. Nothing moves."""
    check_dim(comm, x, dim)
    if x.size(dim) % comm.size:
        raise ShapeMismatch(f"rank {comm.rank}: {comm.size} ranks can't share {x.size(dim)} "
                            f"evenly (dimension {dim} of {tuple(x.shape)}); pad it")
    return x.chunk(comm.size, dim)[comm.rank]


def check_dim(comm: Comm, x: Tensor, dim: int) -> None:
    """Raise `ShapeMismatch` unless `x` has the dimension `dim`."""
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ShapeMismatch(f"rank {comm.rank}: a tensor of shape {tuple(x.shape)} has no "
                            f"dimension {dim!r} to be cut or joined along")


def gathered(comm: Comm, x: Tensor, dim: int) -> Tensor:
    """All ranks' parts, joined along `dim`. Cost: an all-gather."""
    check_dim(comm, x, dim)
    return torch.cat(all_gather(comm, x.detach()).unbind(), dim)


def reduced_part(comm: Comm, x: Tensor, dim: int) -> Tensor:
    """This rank's part of the sum over all ranks. Cost: a reduce-scatter."""
    part(comm, x, dim)  # does it divide?
    parts = torch.stack(x.detach().chunk(comm.size, dim))
    return reduce_scatter(comm, parts, overwrite=True)


# ---- the six pairs -------------------------------------------------------------------------------


@conversion(INVARIANT, REPLICATED)
def copy_to(comm: Comm, x: Tensor) -> Tensor:
    """Megatron's f: `x`, the same on all ranks, enters a region where each computes its own part.

    Backward: an all-reduce, since each rank has a part of x's gradient. Forgotten, the forward pass
    is perfect, and the gradients are wrong.
    """
    return pair(x, lambda x: x.view_as(x), lambda gradient: summed(comm, gradient))


@conversion(PARTIAL, INVARIANT)
def reduce_from(comm: Comm, x: Tensor) -> Tensor:
    """Megatron's g: the sum of all ranks' `x` leaves the region. Backward: nothing moves."""
    return pair(x, lambda x: summed(comm, x), lambda gradient: gradient)


@conversion(VARYING, REPLICATED)
def gather_from(comm: Comm, x: Tensor, dim: int = SEQUENCE) -> Tensor:
    """All ranks' parts, joined along `dim`, enter a region. Backward: a reduce-scatter."""
    return pair(x, lambda x: gathered(comm, x, dim),
                lambda gradient: reduced_part(comm, gradient, dim))


@conversion(PARTIAL, VARYING)
def reduce_scatter_to(comm: Comm, x: Tensor, dim: int = SEQUENCE) -> Tensor:
    """The sum of all ranks' `x` leaves the region; each rank keeps its part, along `dim`.

    Raises `ShapeMismatch` unless the ranks divide `dim`. Backward: an all-gather.
    """
    return pair(x, lambda x: reduced_part(comm, x, dim),
                lambda gradient: gathered(comm, gradient, dim))


@conversion(INVARIANT, VARYING)
def scatter_to(comm: Comm, x: Tensor, dim: int = SEQUENCE) -> Tensor:
    """Each rank keeps its part of `x`, which is the same on all. Backward: an all-gather.

    Raises `ShapeMismatch` unless the ranks divide `dim`.
    """
    return pair(x, lambda x: part(comm, x, dim).clone(),
                lambda gradient: gathered(comm, gradient, dim))


@conversion(VARYING, INVARIANT)
def gather_invariant(comm: Comm, x: Tensor, dim: int = SEQUENCE) -> Tensor:
    """All ranks' parts, joined along `dim`, which all then use in the same way: each rank computes
    the whole gradient, and keeps its part."""
    return pair(x, lambda x: gathered(comm, x, dim), lambda gradient: part(comm, gradient, dim))
