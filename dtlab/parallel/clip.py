"""Clipping by the norm of the whole gradient, wherever its parts lie."""

from __future__ import annotations

import torch
from torch import Tensor

from dtlab.checks import check_number
from dtlab.collectives import all_reduce
from dtlab.errors import ConfigError
from dtlab.parallel.hybrid import Hybrid
from dtlab.parallel.sharded import parts_of
from dtlab.parallel.synchronized import DistributedModule, check_distributed


@torch.no_grad()
def clip_grad_norm_(model: DistributedModule, max_norm: float) -> Tensor:
    """In place: scale all gradients of `model`, of `DataParallel`, `zero` or `hybrid`, by the same
    factor, so that their Euclidean norm is at most `max_norm`. Returns the norm before, equal on
    all ranks; parameters of which several ranks have copies count once.

    Call it between backward and step. Cost: with shards, an all-reduce of 8 bytes; the parts of
    tensor-parallel layers take one of their own, and one over the ranks that have parts.
    Source: Pascanu et al. 2013; torch.nn.utils.clip_grad_norm_ for one device.
    """
    check_distributed(model, "clip_grad_norm_")
    check_number("max_norm", max_norm)
    if not max_norm > 0:
        raise ConfigError(f"max_norm must be a number above 0, not {max_norm!r}")
    gradients = model.named_gradients()
    parts = {} if isinstance(model, Hybrid) else parts_of(model.module)  # its `comm` joins them
    squares = {comm: torch.zeros((), dtype=torch.float64, device=model.comm.device)
               for comm in (None, *(comm for comm, _ in parts.values()))}  # None: of whole ones
    for name, gradient in gradients:
        comm, original = parts.get(name, (None, model.is_original(name)))
        if original:
            squares[comm] += gradient.abs().double().square().sum()
    for comm, square in squares.items():
        for ranks in (model.comm if model.sharded else None, comm):
            if ranks is not None:
                all_reduce(ranks, square, algorithm="recursive_doubling")
    norm = torch.stack([*squares.values()]).sum().sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)
    for _, gradient in gradients:
        gradient *= factor
    return norm
