"""The parameters of one layer as one vector, which ranks can cut evenly; and which those are.

"Unit" as in FSDP: what is gathered, reduced and freed together. Source: Zhao et al. 2023, "PyTorch
FSDP: experiences on scaling fully sharded data parallel".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import TransformType, retrieve_all_functorch_interpreters

from dtlab.checks import short
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.parallel.memory import mark
from dtlab.parallel.sharded_parameter import (
    FreedParameter,
    GradientPart,
    MasterParameter,
    ShardedParameter,
    local_gradient,
    set_local_gradient,
)
from dtlab.parallel.types import VARYING, declare, known_letters


def layers_of(module: nn.Module, layers: Iterable[nn.Module] | None = None) -> list[nn.Module]:
    """Return `layers`; if None, the elements of the outermost lists and sequences of modules in
    `module`."""
    if layers is not None:
        layers = list(layers) if isinstance(layers, Iterable) else [layers]
        for layer in layers:
            if layer not in module.modules():
                raise ConfigError(f"layers is a list of modules that belong to the one that zero "
                                  f"wraps; {short(layer)} doesn't")
        return with_forward(layers)
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return with_forward(module)
    return [layer for child in module.children() for layer in layers_of(child)]


def with_forward(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Replace modules without a forward, such as lists within lists, by what they hold."""
    return [layer for m in modules for layer in (
        with_forward(m.children()) if getattr(m.forward, "__func__", 0) is nn.Module.forward
        else [m])]


def parameters_by_layer(layers: Sequence[nn.Module]) -> list[dict[nn.Parameter, str]]:
    """The trained parameters of each layer that have elements, in order, with their names; the
    first layer, which is the root, has those that belong to none of the others, or not to one
    alone."""
    root, *others = layers
    names = {p: name for name, p in root.named_parameters() if p.requires_grad and p.numel()}
    uses = Counter(p for _, p in root.named_parameters(remove_duplicate=False))
    owners = Counter(p for layer in others for p in layer.parameters())
    owned = []
    for layer in others:
        inside = Counter(p for _, p in layer.named_parameters(remove_duplicate=False))
        owned.append({p: names[p] for p in inside
                      if p in names and inside[p] == uses[p] and owners[p] == 1})
    elsewhere = {p for layer in owned for p in layer}
    return [{p: name for p, name in names.items() if p not in elsewhere}, *owned]


class Piece(NamedTuple):
    """The elements of a parameter, from `start` on, that lie in this rank's shard at `place`;
    `master` is these, as the optimizer steps them."""

    start: int
    place: slice
    master: Any


class Unit:
    """Parameters that travel together: those of one layer, in one vector that N divides.

    names: of the parameters. whole: (N·n,) all of them, of which the module's parameters are views;
    None while it is freed, as it is at first unless it is to `keep`. shard: (n,) this rank's row of
    it. master: (n,) the shard itself, or a copy in the optimizer's dtype and on its device. pieces:
    by parameter, what the shard has of it.
    gradients: like `whole`, while they are computed, of the parameters that are `computed`.
    gradient: (n,) this rank's shard of what all ranks' add up to, where those of the parameters
    that no rank has computed, all but `reduced`, are 0.
    """

    def __init__(self, names: Mapping[nn.Parameter, str], comm: Comm, dtype: torch.dtype,
                 offload: bool, keep: bool):
        parameters = list(names)
        sizes = [p.numel() for p in parameters]
        self.comm, self.padding = comm, -sum(sizes) % comm.size
        self.numel = sum(sizes) + self.padding
        self.starts = {p: sum(sizes[:i]) for i, p in enumerate(parameters)}
        values = torch.cat([*(p.detach().flatten() for p in parameters),
                            parameters[0].detach().new_zeros(self.padding)])
        for p in parameters:
            p.__class__ = ShardedParameter
            p.unit = self  # type: ignore[attr-defined]
        self.names: Mapping[Any, str] = names
        first, *others = names.values()
        self.label = f"{first} and {len(others)} more" if others else first  # of its messages
        self.parameters: list[Any] = parameters
        self.open(mark(values.to(dtype), "parameters"))
        self.shard = self.row_of(self.whole)
        if not keep:
            self.shard = mark(self.shard.clone(), "parameters")
            self.free()
        if offload or dtype != values.dtype:
            mine = self.row_of(values)
            self.master = mine.to("cpu" if offload else mine.device, copy=True)
        else:
            self.master = self.shard
        self.use: Callable[[Unit], Tensor]  # gather it, if it is freed
        self.awaited = set(parameters)  # those whose gradient this backward has not computed yet
        self.gradients: Tensor | None = None
        self.gradient: Tensor | None = None
        self.computed: set[nn.Parameter] = set()
        self.reduced: set[nn.Parameter] = set()
        self.pieces = dict(self._pieces())
        for p, piece in self.pieces.items():
            piece.master.whole = p
            known_letters[piece.master] = dict(known_letters.get(values, {}))
            declare(piece.master, comm, VARYING)

    def row_of(self, whole: Tensor | None) -> Tensor:
        """This rank's row."""
        assert whole is not None
        return whole.view(self.comm.size, -1)[self.comm.rank]

    def _pieces(self) -> Iterator[tuple[nn.Parameter, Piece]]:
        begin = self.comm.rank * len(self.shard)
        for p, first in self.starts.items():
            low, high = max(first, begin), min(first + p.numel(), begin + len(self.shard))
            if low < high:
                place = slice(low - begin, high - begin)
                yield p, Piece(low - first, place, MasterParameter(self.master[place]))

    # ---- parameters ------------------------------------------------------------------------------

    def open(self, whole: Tensor) -> None:
        """The parameters are views of `whole`."""
        self.whole: Tensor | None = whole
        for p, start in self.starts.items():
            p.__class__ = ShardedParameter
            p.data = whole[start : start + p.numel()].view(p.shape)

    @torch.inference_mode(False)
    def free(self) -> None:
        """Take the parameters' values away. A tensor that views `whole` keeps its memory alive."""
        if self.whole is not None:
            nothing = mark(self.whole.new_full((), torch.nan), "buffers")
            for p in self.parameters:
                p.data = nothing.expand(p.shape)
                p.__class__ = FreedParameter
            self.whole = None

    def check(self) -> None:
        """Raise `ConfigError` if a parameter isn't a view of `whole` any more."""
        if self.whole is not None:
            mine = self.whole.untyped_storage()._cdata
            for p in self.parameters:
                if p.numel() and p.untyped_storage()._cdata != mine:
                    raise ConfigError(f"rank {self.comm.rank}: {self.names[p]!r} isn't the tensor "
                                      f"any more that ZeRO shards; convert or replace parameters "
                                      f"before wrapping, and change them in place")

    @torch.no_grad()
    def take_row(self) -> None:
        """Keep what the user, or forward, has changed in the parameters."""
        self.check()
        if self.whole is not None:
            self.shard.copy_(self.row_of(self.whole))

    @torch.no_grad()
    def take_writes(self) -> None:
        """Do as `take_row`, and give the changes to the optimizer, too."""
        self.take_row()
        if self.master is not self.shard:
            written = self.shard != self.master.to(self.shard)
            self.master[written.to(self.master.device)] = self.shard[written].to(self.master)

    def take_step(self) -> None:
        """The optimizer has stepped `master`."""
        for piece in self.pieces.values():
            set_local_gradient(piece.master, None)
            piece.master.__class__ = MasterParameter
        if self.master is not self.shard:
            self.shard.copy_(self.master)

    # ---- gradients -------------------------------------------------------------------------------

    def add_gradient(self, p: nn.Parameter) -> None:
        """Move the gradient that backward has computed into `gradients`."""
        gradient = local_gradient(p)
        if gradient.is_sparse:
            raise ConfigError(f"ZeRO needs dense gradients, but that of {self.names[p]!r} is "
                              f"sparse; make embeddings with sparse=False")
        if self.gradients is None:
            self.gradients = mark(self.shard.new_zeros(self.numel), "gradients")
        self.gradients[self.starts[p] : self.starts[p] + p.numel()] += gradient.flatten()
        self.computed.add(p)
        set_local_gradient(p, None)

    def take_gradients(self) -> Tensor:
        """Return `gradients`, which are the caller's now, with those from before this backward."""
        for p in self.parameters:
            if local_gradient(p) is not None:
                self.add_gradient(p)
        gradients, self.gradients = self.gradients, None
        return self.shard.new_zeros(self.numel) if gradients is None else gradients

    def add_reduced(self, mine: Tensor) -> None:
        """Add this rank's shard of what has been reduced. After a step, `gradient` may lie
        elsewhere, and have another dtype: the optimizer's."""
        self.gradient = mine if self.gradient is None else self.gradient.add_(
            mine.to(self.gradient))

    def gradient_of(self, p: nn.Parameter) -> Tensor | None:
        """This rank's part of the reduced gradient, which may have no elements."""
        if self.gradient is None or p not in self.reduced:
            return None
        place = self.pieces[p].place if p in self.pieces else slice(0)
        return self.gradient[place].as_subclass(GradientPart)

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """This rank's parts of the reduced gradients, each with its parameter's name."""
        return [(self.names[p], self.gradient[piece.place]) for p, piece in self.pieces.items()
                if self.gradient is not None and p in self.reduced]

    def set_zero_gradient(self, p: nn.Parameter) -> None:
        """See `SynchronizedModule`."""
        self.reduced.add(p)
        if self.gradient is None:
            self.gradient = mark(torch.zeros_like(self.shard), "gradients")

    def assign_gradients(self) -> None:
        """Assign the reduced gradient to the optimizer's parameters, the masters."""
        if self.gradient is not None:
            self.gradient = self.gradient.to(self.master)
        for p, piece in self.pieces.items():
            piece.master.__class__ = nn.Parameter  # of which foreach and fused optimizers know
            if self.gradient is not None and p in self.reduced:
                piece.master.grad = self.gradient[piece.place]

    def has_gradients(self) -> bool:
        """Has backward computed any that are not reduced yet?"""
        return self.gradients is not None or any(
            local_gradient(p) is not None for p in self.parameters)


def saved_as_views(units: Sequence[Unit], use: Callable[[Unit], Tensor]) -> tuple[Any, Any]:
    """Two hooks for `saved_tensors_hooks`: of a view of a unit, autograd saves only which one it
    is, and where; `use` returns the unit's values when backward needs them."""
    outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # the user's
    pack, unpack = outer or (lambda x: (x, x._version), _unpack_if_unchanged)

    def save(x: Tensor) -> Any:
        storage = x.untyped_storage()._cdata
        for unit in units:
            if unit.whole is not None and unit.whole.untyped_storage()._cdata == storage:
                return unit, x.size(), x.stride(), x.storage_offset()
        return pack(x)

    def saved(packed: Any) -> Any:
        if isinstance(packed, tuple) and packed and isinstance(packed[0], Unit):
            unit, *view = packed
            return use(unit).as_strided(*view)
        return unpack(packed)

    return save, saved


def _unpack_if_unchanged(packed: tuple[Tensor, int]) -> Tensor:
    """A tensor that autograd has saved, and its version then, which torch compares itself, but not
    where saving has hooks."""
    x, version = packed
    if x._version != version:
        raise ConfigError(f"a tensor of shape {tuple(x.shape)} that backward needs was changed in "
                          f"place after the forward pass had used it")
    return x


def in_torch_func(allowed: bool) -> bool:
    """Does one of torch.func's transforms that differentiate run? Raise `ConfigError` if so, unless
    it is `allowed`."""
    runs = any(transform.key() != TransformType.Vmap
               for transform in retrieve_all_functorch_interpreters())
    if runs and not allowed:
        raise ConfigError("torch.func can't differentiate while ZeRO 3 gathers and frees layers; "
                          "call it inside `with model.gathered():`, which all ranks enter")
    return runs
