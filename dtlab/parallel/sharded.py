"""Modules whose parameters are parts of whole ones, cut over the ranks of a communicator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from dtlab.collectives import all_reduce
from dtlab.collectives.registry import check_comm, chunk_edges
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.parallel.types import VARYING, declare

Cut = Sequence[range]  # which rows, or columns, of a whole tensor
holders = WeakIdKeyDictionary()  # parameter → (its module, which part of what it is)


class ShardMetadata(NamedTuple):
    """A parameter is the `cut` of the tensor called `whole`, of this `shape`, along `dim`; of
    several ranks' copies, one is the `original`. letter: its type along the ranks."""

    whole: str
    shape: torch.Size
    dim: int
    cut: Cut
    original: bool
    letter: str

    def runs(self, start: int, at: int, length: int) -> list[tuple[int, int, int]]:
        """Return where in the flattened whole the elements `start` to `start + length` of the
        flattened part are, which lie from `at` on: (start, at, length) of each contiguous piece."""
        index = torch.arange(math.prod(self.shape), device="cpu").view(self.shape)
        pieces = [index.narrow(self.dim, rows.start, len(rows)) for rows in self.cut]
        places = torch.cat(pieces, self.dim).flatten()[start : start + length]
        firsts = [0, *((places.diff() != 1).nonzero().flatten() + 1).tolist()]
        ends = [*firsts[1:], length]
        return [(int(places[first]), at + first, end - first)
                for first, end in zip(firsts, ends, strict=True)]


def share(count: int, comm: Comm) -> range:
    """This rank's share of `count`, as torch.tensor_split cuts: sizes differ by at most 1."""
    edges = chunk_edges(count, comm.size)
    return range(edges[comm.rank], edges[comm.rank + 1])


class ShardedModule(nn.Module):
    """A module whose parameters are parts of whole ones: `parts` says which, by name. sequence: is
    what lies around it cut by positions? See `dtlab.parallel.sequence`."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, comm: Comm, sequence: bool | str):
        super().__init__()
        check_comm(comm, f"{type(self).__name__}(comm, …)")
        check_sequence(sequence)
        self.comm, self.sequence = comm, sequence
        self.parts: dict[str, ShardMetadata] = {}

    def keep(self, name: str, whole_name: str, whole: Tensor | None, dim: int, cut: Cut,
             original: bool = True, letter: str = VARYING) -> None:
        """Set the parameter `name` to the part of `whole` that this rank keeps."""
        if whole is None:
            self.register_parameter(name, None)
            return
        pieces = [whole.detach().narrow(dim, rows.start, len(rows)) for rows in cut]
        parameter = nn.Parameter(torch.cat(pieces, dim), requires_grad=whole.requires_grad)
        self.parts[name] = ShardMetadata(whole_name, whole.shape, dim, cut, original, letter)
        self.register_parameter(name, parameter)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._hold()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:  # of to_empty, to, double, …
        super()._apply(fn, recurse)
        self._hold()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy
        super().__setstate__(state)
        self._hold()

    def _hold(self) -> None:
        """The parameters, which may be new ones, are these parts."""
        for name, parameter in self.named_parameters(recurse=False):
            if name in self.parts:
                part = self.parts[name]
                declare(parameter, self.comm, part.letter)
                holders[parameter] = self, part


def check_sequence(sequence: object) -> None:
    """Raise `ConfigError` unless `sequence` is a way of sequence parallelism, or none."""
    if sequence not in (False, True, "regather"):
        raise ConfigError(f'sequence must be False, True or "regather", not {sequence!r}')


def whole_names(module: nn.Module) -> Iterator[tuple[nn.Parameter, str, ShardMetadata | None]]:
    """Each parameter, its name on one device, and which part of it this is (None: all)."""
    for prefix, child in module.named_modules():
        for name, p in child.named_parameters(recurse=False):
            part = getattr(child, "parts", {}).get(name)
            yield p, ".".join(filter(None, (prefix, part.whole if part else name))), part


def parts_of(module: nn.Module) -> dict[str, tuple[Comm, bool]]:
    """The parameters that are parts, by name: over which ranks the whole is cut, and is this the
    original?"""
    held = ((name, *holders[p]) for name, p in module.named_parameters() if p in holders)
    return {name: (holder.comm, part.original) for name, holder, part in held}


def full_tensors(module: nn.Module, comm: Comm, of: Callable[[Tensor], Tensor | None] = lambda p: p
                 ) -> dict[str, Tensor]:
    """Return `of` each parameter (itself, or `lambda p: p.grad`) of a sharded module, whole, by the
    name that it has on one device, on all ranks of `comm`, which all call it."""
    whole: dict[str, Tensor] = {}
    cut: set[str] = set()
    for p, key, part in whole_names(module):
        mine = of(p)
        if mine is None:
            continue
        if part is None:
            whole[key] = mine.detach().clone()
            continue
        cut.add(key)
        whole.setdefault(key, mine.new_zeros(part.shape))
        if not part.original:
            continue
        pieces = mine.detach().split([len(rows) for rows in part.cut], part.dim)
        for rows, piece in zip(part.cut, pieces, strict=True):
            whole[key].narrow(part.dim, rows.start, len(rows)).copy_(piece)
    for key in sorted(cut):
        all_reduce(comm, whole[key])
    return whole
