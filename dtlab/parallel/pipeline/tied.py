"""Parameters that several stages share, as the first and the last do a GPT's embedding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from dtlab.collectives import all_reduce, broadcast
from dtlab.comm import Comm

Tied = list[tuple[Comm, nn.Parameter]]  # each parameter, and the ranks that have it


def tie(comm: Comm, tied: Mapping[str, nn.Parameter]) -> Tied:
    """Those of `tied` that several ranks call the same, equal now."""
    everyone = comm._all_gather_objects(sorted(tied))
    pairs = []
    for name in sorted({name for names in everyone for name in names}):
        ranks = [rank for rank, names in enumerate(everyone) if name in names]
        if len(ranks) > 1 and name in tied:
            group = comm.subgroup(ranks)
            broadcast(group, tied[name].detach())
            pairs.append((group, tied[name]))
    return pairs


def reduce_tied(tied: Tied) -> None:
    """Add up their gradients."""
    for group, parameter in tied:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        all_reduce(group, parameter.grad)
