"""The parameters of one layer as one vector, which ranks can cut evenly.

"Unit" as in FSDP: what is gathered, reduced and freed together. Source: Zhao et al. 2023, "PyTorch
FSDP: experiences on scaling fully sharded data parallel".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from dtlab.comm import Comm
from dtlab.parallel.memory import mark
from dtlab.parallel.types import VARYING, declare, known_letters


class Unit:
    """Parameters that travel together: those of one layer, in one vector that N divides.

    whole: (N·n,) all of them, of which the module's parameters are views. master: (n,) this rank's
    shard, which the optimizer steps: a part of `whole` itself, or a copy in the optimizer's dtype
    and on its device. gradients: like `whole`, while they are computed. gradient: (n,) this rank's
    shard of what all ranks' add up to.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], comm: Comm, dtype: torch.dtype,
                 offload: bool):
        self.parameters = parameters
        sizes = [p.numel() for p in parameters]
        self.padding = -sum(sizes) % comm.size
        values = torch.cat([*(p.detach().flatten() for p in parameters),
                            parameters[0].detach().new_zeros(self.padding)])
        self.whole = mark(values.to(dtype), "parameters")
        for p, piece in zip(parameters, self.whole.split([*sizes, self.padding]), strict=False):
            p.data = piece.view(p.shape)
        self.shard = self.whole.view(comm.size, -1)[comm.rank]
        separate = dtype != values.dtype or offload
        mine = values.view(comm.size, -1)[comm.rank]
        self.master = nn.Parameter(
            mine.to("cpu" if offload else mine.device, copy=True) if separate else self.shard)
        known_letters[self.master] = dict(known_letters.get(self.whole, {}))
        declare(self.master, comm, VARYING)
        self.starts = {p: sum(sizes[:i]) for i, p in enumerate(parameters)}
        self.awaited = set(parameters)  # those whose gradient this backward has not computed yet
        self.gradients: Tensor | None = None
        self.gradient: Tensor | None = None

    def my_parts(self, rank: int) -> Iterator[tuple[nn.Parameter, int, int, int]]:
        """(p, start, at, count): `count` elements of `p`, from `start` on, lie in `rank`'s shard
        from `at` on."""
        begin = rank * len(self.shard)
        for p, first in self.starts.items():
            low, high = max(first, begin), min(first + p.numel(), begin + len(self.shard))
            if low < high:
                yield p, low - first, low - begin, high - low

    def add_gradient(self, p: nn.Parameter) -> None:
        """Move `p.grad` into `gradients`."""
        assert p.grad is not None
        if self.gradients is None:
            self.gradients = mark(torch.zeros_like(self.whole), "gradients")
        self.gradients[self.starts[p] : self.starts[p] + p.numel()] += p.grad.flatten()
        p.grad = None

    def take_gradients(self) -> Tensor:
        """`gradients`, which are the caller's now, with those from before this backward."""
        for p in self.parameters:
            if p.grad is not None:
                self.add_gradient(p)
        gradients, self.gradients = self.gradients, None
        return torch.zeros_like(self.whole) if gradients is None else gradients

    def take_step(self) -> None:
        """The optimizer has stepped `master`."""
        self.master.grad = None
        if self.master.data_ptr() != self.shard.data_ptr():
            self.shard.copy_(self.master)


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The elements of the outermost lists and sequences of modules in `module`."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return list(module)
    return [layer for child in module.children() for layer in layers_of(child)]


def parameters_by_layer(layers: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """The trained parameters of each layer, in order; the first layer, which is the root, has those
    that belong to none of the others, or to several."""
    owners = Counter(p for layer in layers[1:] for p in layer.parameters())
    return [[p for p in layer.parameters() if p.requires_grad and (owners[p] == 1) == bool(number)]
            for number, layer in enumerate(layers)]
