"""Sequence parallelism: between tensor-parallel regions, each rank holds s/t of the positions.

The all-reduce at the end of a region becomes a reduce-scatter, and the next region begins with an
all-gather: the same bytes, but norms, dropouts and residuals are computed and kept once, not t
times. Shapes: b samples, s positions, h hidden, t ranks. Source: Korthikanti et al. 2022, §4.2.2.
Chapter: 11.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

from dtlab.checks import check_whole
from dtlab.collectives import all_gather
from dtlab.comm import Comm
from dtlab.errors import ConfigError, ShapeMismatch
from dtlab.models import GPT
from dtlab.parallel.conversions import (
    SEQUENCE,
    check_dim,
    copy_to,
    gathered,
    reduced_part,
    refuse_torch_func,
    scatter_to,
)
from dtlab.parallel.types import VARYING, conversion


class SequenceNorm(nn.Module):
    """A LayerNorm with the parameters of `norm`, on this rank's positions: x (b, s/t, h) → the same
    shape. Each rank computes a part of the parameters' gradients; `copy_to` adds them up.

    Without that, the norms of the ranks drift apart (NVIDIA/Megatron-LM#1446).
    """

    def __init__(self, comm: Comm, norm: Any):
        super().__init__()
        if not isinstance(norm, nn.LayerNorm):
            raise ConfigError(f"SequenceNorm takes an nn.LayerNorm, not {type(norm).__name__}")
        self.comm, self.shape, self.eps = comm, norm.normalized_shape, norm.eps
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        own = dict(self.named_parameters())  # weight and bias, of which `norm` may have had none
        shared = copy_to(self.comm, torch.stack([*own.values()])) if own else ()
        return layer_norm(x, self.shape, **dict(zip(own, shared, strict=True)), eps=self.eps)


@conversion(VARYING, VARYING)
def gather_linear(comm: Comm, x: Tensor, weight: Tensor, bias: Tensor | None = None,
                  chunks: int = 1) -> Tensor:
    """Return `linear(gather_from(comm, x), weight, bias)` with less memory and, with `chunks` > 1,
    less waiting: x (b, s/t, h), weight (o, h) → (b, s, o).

    Only this rank's positions are kept for backward, which gathers the others again, while it
    multiplies: 1/t of the memory for an all-gather more. Forward, the positions come in `chunks`;
    each is multiplied while the next is under way. Raises `ShapeMismatch` unless `chunks` divides
    s/t. Source: Korthikanti et al. 2022, §4.2.2; Wang et al. 2023 (overlap by decomposition).
    """
    check_whole("gather_linear: chunks", chunks)
    check_dim(comm, x, SEQUENCE)
    if x.size(SEQUENCE) % chunks:
        raise ShapeMismatch(f"rank {comm.rank}: {chunks} chunks don't divide the "
                            f"{x.size(SEQUENCE)} positions of this rank")
    refuse_torch_func()
    product: Tensor = _GatherLinear.apply(x, weight, bias, comm, chunks)
    return product


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, comm: Comm, chunks: int
                ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.comm, ctx.has_bias = comm, bias is not None
        arriving = [comm.begin(all_gather, chunk.contiguous())
                    for chunk in x.detach().chunk(chunks, SEQUENCE)]
        products = [linear(gather.wait(), weight, bias) for gather in arriving]  # (t, b, ·, o)
        rows = torch.cat(products, SEQUENCE).unbind()  # the positions of rank 0, of rank 1, …
        return torch.cat(rows, SEQUENCE)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # with create_graph
            raise ConfigError("what gather_linear gathers again for backward can't be "
                              "differentiated twice; take sequence=True instead of \"regather\"")
        x, weight = (saved.to(gradient.dtype) for saved in ctx.saved_tensors)  # as autocast has
        inputs = ctx.comm.begin(gathered, x, SEQUENCE)
        partial = gradient @ weight
        result = ctx.comm.begin(reduced_part, partial, SEQUENCE)
        rows = gradient.flatten(0, -2)
        weight_gradient = rows.T @ inputs.wait().flatten(0, -2)
        bias_gradient = rows.sum(0) if ctx.has_bias else None
        return result.wait(), weight_gradient, bias_gradient, None, None


def cut_positions(gpt: GPT, comm: Comm) -> None:
    """In place: what lies between the tensor-parallel regions of `gpt` is cut by positions."""
    gpt.positions.register_forward_hook(lambda _embedding, _places, x: scatter_to(comm, x))
    gpt.norm = SequenceNorm(comm, gpt.norm)
    dropouts = [gpt.dropout]
    block: Any
    for block in gpt.blocks:
        block.attention_norm = SequenceNorm(comm, block.attention_norm)
        block.mlp_norm = SequenceNorm(comm, block.mlp_norm)
        dropouts += block.attention_dropout, block.mlp_dropout
    for dropout in dropouts:
        dropout.part = 0, comm.rank, comm.size
