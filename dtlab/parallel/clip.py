"""Clipping by the norm of the whole gradient, wherever its parts lie."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor, nn

from dtlab.checks import check_number
from dtlab.collectives import all_reduce
from dtlab.errors import ConfigError
from dtlab.parallel.hybrid import Hybrid
from dtlab.parallel.pipeline import Pipeline
from dtlab.parallel.sharded import parts_of
from dtlab.parallel.synchronized import DistributedModule, check_distributed


@torch.no_grad()
def clip_grad_norm_(model: DistributedModule | Pipeline, max_norm: float) -> Tensor:
    """In place: scale all gradients of `model`, of `DataParallel`, `zero` or `hybrid`, or of all
    stages of a `Pipeline`, by the same factor, so that their Euclidean norm is at most `max_norm`.
    Returns the norm before, equal on all ranks; parameters of which several ranks have copies count
    once.

    Call it between backward and step. Cost: with shards, an all-reduce of 8 bytes; the parts of
    tensor-parallel layers take one of their own, and one over the ranks that have parts; a pipeline
    takes one.
    Source: Pascanu et al. 2013; torch.nn.utils.clip_grad_norm_ for one device.
    """
    check_number("max_norm", max_norm)
    if not max_norm > 0:
        raise ConfigError(f"max_norm must be a number above 0, not {max_norm!r}")
    if isinstance(model, Pipeline):
        stages = [*model.modules.values()]
        square = torch.zeros((), dtype=torch.float64, device=model.comm.device)
        counted = {p for group, p in model.tied if group.rank}  # by the first rank of the group
        for stage in stages:
            square += _sum_of_squares(stage, square.device, counted)
            counted |= {*stage.parameters()}
        all_reduce(model.comm.labelled("clip_grad_norm_"), square)
    else:
        check_distributed(model, "clip_grad_norm_")
        stages, square = [model], _sum_of_squares(model, model.comm.device)
    norm = square.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)
    for gradient in {gradient for stage in stages for _, gradient in _gradients(stage)}:
        gradient *= factor
    return norm


def _gradients(model: nn.Module) -> list[tuple[str, Tensor]]:
    if isinstance(model, DistributedModule):
        return model.named_gradients()
    return [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]


def _sum_of_squares(model: nn.Module, device: torch.device,
                    counted: Set[nn.Parameter] = frozenset()) -> Tensor:
    """Add up the squares of the gradients not `counted`, on all ranks that have parts."""
    wrapper = model if isinstance(model, DistributedModule) else None
    module = wrapper.module if wrapper else model
    parts = {} if isinstance(model, Hybrid) else parts_of(module)  # its `comm` joins them
    left_out = {name for name, p in module.named_parameters() if p in counted}
    squares = {comm: torch.zeros((), dtype=torch.float64, device=device)
               for comm in (None, *(comm for comm, _ in parts.values()))}  # None: of whole ones
    for name, gradient in _gradients(model):
        comm, original = parts.get(name, (None, not wrapper or wrapper.is_original(name)))
        if original and name not in left_out:
            squares[comm] += gradient.abs().double().square().sum()
    for comm, square in squares.items():
        for ranks in (wrapper.comm if wrapper and wrapper.sharded else None, comm):
            if ranks is not None:
                all_reduce(ranks.labelled("clip_grad_norm_"), square,
                           algorithm="recursive_doubling")
    return torch.stack([*squares.values()]).sum()
