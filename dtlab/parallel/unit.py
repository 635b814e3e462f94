"""The parameters of one layer as one vector, which ranks can cut evenly.

"Unit" as in FSDP: what is gathered, reduced and freed together. Source: Zhao et al. 2023, "PyTorch
FSDP: experiences on scaling fully sharded data parallel".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import TransformType, retrieve_all_functorch_interpreters
from torch._guards import TracingContext
from torch.utils._pytree import tree_leaves

from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.parallel.hooks import in_autograd
from dtlab.parallel.memory import mark
from dtlab.parallel.types import VARYING, declare, known_letters


def local_gradient(p: nn.Parameter) -> Any:
    """Return what this rank's backward has computed, until it is reduced."""
    return Tensor.grad.__get__(p)  # type: ignore[union-attr]


def set_local_gradient(p: nn.Parameter, gradient: Tensor | None) -> None:
    Tensor.grad.__set__(p, gradient)  # type: ignore[union-attr]


class GradientPart(Tensor):
    """A rank's part of a gradient, 1-D, for what treats each element by itself. All else, as its
    norm, would be taken for that of the whole."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            shapes = [x.shape for x in tree_leaves((args, kwargs)) if isinstance(x, cls)]
            try:
                made = super().__torch_function__(func, types, args, kwargs or {})
                if all(x.shape in shapes for x in tree_leaves(made) if isinstance(x, Tensor)):
                    return made
                error = None
            except (RuntimeError, IndexError) as raised:
                error = raised
        raise ConfigError(f"with ZeRO a rank has only a part of each gradient, 1-D, of which "
                          f"{func.__name__} isn't that of the whole; for norms, call "
                          f"dtlab.parallel.clip_grad_norm_(model, …); model.named_gradients() has "
                          f"the parts as ordinary tensors") from error


class ShardedParameter(nn.Parameter):
    """A parameter that a unit holds. After backward, its `grad` is what this rank keeps: its part
    of the reduced gradient, 1-D, which may have no elements."""

    unit: Unit

    @property
    def grad(self) -> Any:
        own, unit = local_gradient(self), self.__dict__.get("unit")
        if own is not None or unit is None or TracingContext.try_get():
            return own  # torch.compile looks only whether there is one of the parameter's shape
        return unit.gradient_of(self)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        unit = self.__dict__.get("unit")
        if isinstance(gradient, GradientPart):  # as `p.grad *= 2` does
            self.grad.copy_(gradient)
            return
        if unit is not None and (part := unit.gradient_of(self)) is not None:
            part.zero_()
            unit.reduced.discard(self)  # until the new one is reduced
        set_local_gradient(self, gradient)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied  # which no unit holds

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter, (self.detach(), self.requires_grad)  # elsewhere, no unit holds it


class FreedParameter(ShardedParameter):
    """One whose unit is freed: it has a shape and a dtype, but no values, and says so."""

    KNOWN: ClassVar = {
        *(getattr(Tensor, name).__get__ for name in (
            "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "is_meta",
            "is_sparse", "is_leaf", "requires_grad", "grad", "grad_fn", "_version",
            "_backward_hooks", "_post_accumulate_grad_hooks")),
        *(getattr(Tensor, name).__set__ for name in (
            "grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")),
        Tensor.size, Tensor.dim, Tensor.numel, Tensor.element_size, Tensor.__len__,
        Tensor.is_floating_point, Tensor.is_complex, Tensor.requires_grad_, Tensor.register_hook,
        Tensor.untyped_storage, Tensor.register_post_accumulate_grad_hook}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.KNOWN:
            return super().__torch_function__(func, types, args, kwargs or {})
        freed = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, FreedParameter))
        if in_autograd():  # reentrant checkpointing runs a part of the layer once more
            freed.unit.use(freed.unit)
            return func(*args, **kwargs or {})
        raise ConfigError(f"{freed.unit.names[freed]!r} isn't here: with ZeRO 3 a rank has only a "
                          f"part of it outside of its layer's forward; read or change it inside "
                          f"`with model.gathered():`, which all ranks enter, or take "
                          f"full_state_dict(model); if another module's forward reads it, "
                          f"leave its layer out of zero(…, layers=[…])")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{self.unit.names[self]}, {tuple(self.shape)}, freed>"


class Piece(NamedTuple):
    """`length` elements of `parameter`, from `start` on, lie in this rank's shard from `at` on."""

    parameter: nn.Parameter
    start: int
    at: int
    length: int


class Unit:
    """Parameters that travel together: those of one layer, in one vector that N divides.

    names: of the parameters. whole: (N·n,) all of them, of which the module's parameters are views;
    None while it is freed, as it is at first unless it is to `keep`. shard: (n,) this rank's row of
    it. master: (n,) the shard itself, or a copy in the optimizer's dtype and on its device. pieces:
    what parameters the shard has parts of; masters: of each piece, as the optimizer steps it.
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
        self.pieces = list(self._pieces())
        self.masters = [nn.Parameter(self.master[at : at + count])
                        for _, _, at, count in self.pieces]
        for master in self.masters:
            known_letters[master] = dict(known_letters.get(values, {}))
            declare(master, comm, VARYING)

    def row_of(self, whole: Tensor | None) -> Tensor:
        """This rank's row."""
        assert whole is not None
        return whole.view(self.comm.size, -1)[self.comm.rank]

    def _pieces(self) -> Iterator[Piece]:
        begin = self.comm.rank * len(self.shard)
        for p, first in self.starts.items():
            low, high = max(first, begin), min(first + p.numel(), begin + len(self.shard))
            if low < high:
                yield Piece(p, low - first, low - begin, high - low)

    # ---- parameters ------------------------------------------------------------------------------

    def open(self, whole: Tensor) -> None:
        """The parameters are views of `whole`."""
        self.whole: Tensor | None = whole
        for p, start in self.starts.items():
            p.__class__ = ShardedParameter
            p.data = whole[start : start + p.numel()].view(p.shape)

    @torch.inference_mode(False)
    def free(self) -> None:
        """The parameters have no values. Who still holds some of `whole` keeps its memory alive."""
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
        at, count = next(((at, count) for q, _, at, count in self.pieces if q is p), (0, 0))
        return self.gradient[at : at + count].as_subclass(GradientPart)

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """This rank's parts of the reduced gradients, each with its parameter's name."""
        return [(self.names[p], self.gradient[at : at + count]) for p, _, at, count in self.pieces
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
        for (p, _, at, count), master in zip(self.pieces, self.masters, strict=True):
            master.grad = None
            if self.gradient is not None and p in self.reduced:
                master.grad = self.gradient[at : at + count]

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


def torch_func_differentiates(allowed: bool) -> bool:
    """Does one of torch.func's transforms that differentiate run? Raise `ConfigError` if so, unless
    it is `allowed`."""
    runs = any(transform.key() != TransformType.Vmap
               for transform in retrieve_all_functorch_interpreters())
    if runs and not allowed:
        raise ConfigError("torch.func can't differentiate while ZeRO 3 gathers and frees layers; "
                          "call it inside `with model.gathered():`, which all ranks enter")
    return runs
