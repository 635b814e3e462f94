"""Parameters that several stages share, as the first and the last do a GPT's embedding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dtlab.checks import short
from dtlab.collectives import all_reduce, broadcast
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.parallel.hooks import owners_of
from dtlab.parallel.sharded_parameter import local_gradient, set_local_gradient
from dtlab.parallel.zero import Stage3

Tied = list[tuple[Comm, nn.Parameter]]  # each parameter, and the ranks that have it


def tie(comm: Comm, tied: Mapping[str, nn.Parameter]) -> Tied:
    """Make those of `tied` equal that several ranks call the same; return each with its group."""
    if not isinstance(tied, Mapping) or not all(
            isinstance(p, nn.Parameter) for p in tied.values()):
        raise ConfigError(f"tied is a dictionary, parameters by name, not {short(tied)}")
    everyone = comm._all_gather_objects(sorted(tied))
    pairs = []
    for name in sorted(tied):
        ranks = [rank for rank, names in enumerate(everyone) if name in names]
        if len(ranks) > 1:
            if any(isinstance(owner, Stage3) for owner in owners_of(tied[name])):
                raise ConfigError(f"{name!r}, which is tied, can't be in ZeRO 3, where a rank has "
                                  f"a part of it; take stage 1 or 2")
            group = comm.subgroup(ranks)
            broadcast(group, tied[name].detach())
            pairs.append((group, tied[name]))
    return pairs


def take_gradients(tied: Tied) -> list[Tensor | None]:
    """Take away, and return, their gradients from earlier steps, which are sums already."""
    earlier = [local_gradient(parameter) for _, parameter in tied]
    for _, parameter in tied:
        set_local_gradient(parameter, None)
    return earlier


def reduce_tied(tied: Tied, earlier: list[Tensor | None]) -> None:
    """Add up the gradients of this step, and add the earlier ones. One that no rank has computed
    stays what it was: no optimizer shall step what nobody used. Ranks tell each other whether they
    have one, in messages that no trace shows."""
    for (group, parameter), before in zip(tied, earlier, strict=True):
        gradient = local_gradient(parameter)
        if not any(group._all_gather_objects(gradient is not None)):
            set_local_gradient(parameter, before)
            continue
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        all_reduce(group, gradient)
        if parameter.requires_grad:  # one that is frozen has none: no optimizer shall step it
            set_local_gradient(parameter, gradient if before is None else before + gradient)
