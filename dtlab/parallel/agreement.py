"""Do all ranks hold the same model?"""

from __future__ import annotations

from torch import nn

from dtlab.comm import Comm
from dtlab.errors import ConfigError


def check_same_model(module: nn.Module, comm: Comm) -> None:
    """Raise `ConfigError`, on all ranks, unless all ranks' modules have the same parameters and
    buffers: equal names, shapes, dtypes, and the same ones frozen. Values may differ."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"rank {comm.rank}: need a torch.nn.Module, not {module!r}")
    mine = {name: f"has shape {tuple(p.shape)} and dtype {p.dtype}, and is "
                  f"{'trained' if p.requires_grad else 'frozen'}"
            for name, p in (*module.named_parameters(), *module.named_buffers())}
    everyone = comm._agree(mine)
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name in [*first, *theirs]:
            here, there = first.get(name, "is missing"), theirs.get(name, "is missing")
            if here != there:
                raise ConfigError(f"ranks hold different models: {name!r} {here} on rank 0, but "
                                  f"{there} on rank {rank}")
        if list(theirs) != list(first):
            raise ConfigError(f"ranks hold different models: rank {rank} has its parameters in "
                              f"another order than rank 0")
