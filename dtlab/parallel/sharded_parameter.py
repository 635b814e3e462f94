"""Parameters of which a rank has a part, or now and then all; and the parts that it steps."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils._pytree import tree_leaves

from dtlab.errors import ConfigError
from dtlab.parallel.hooks import in_autograd


def local_gradient(p: nn.Parameter) -> Any:
    """Return what this rank's backward has computed, until it is reduced."""
    return Tensor.grad.__get__(p)  # type: ignore[union-attr]


def set_local_gradient(p: nn.Parameter, gradient: Tensor | None) -> None:
    Tensor.grad.__set__(p, gradient)  # type: ignore[union-attr]


class GradientPart(Tensor):
    """A rank's part of a gradient, 1-D, for what treats each element by itself. All else, as its
    norm, would be taken for that of the whole."""

    OF_ALL = "numpy", "__array__", "tolist", "item", "equal", "allclose"  # no tensors

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            shapes = [x.shape for x in tree_leaves((args, kwargs)) if isinstance(x, cls)]
            try:
                made = super().__torch_function__(func, types, args, kwargs or {})
                if func.__name__ not in cls.OF_ALL and all(
                        x.shape in shapes for x in tree_leaves(made) if isinstance(x, Tensor)):
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

    unit: Any  # see `Unit`

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


class MasterParameter(nn.Parameter):
    """A piece of the parameter `whole`, which an optimizer steps. Outside of its step, `grad` is
    this rank's part of the reduced gradient: see `ShardedParameter`."""

    whole: ShardedParameter

    @property
    def grad(self) -> Any:
        return self.whole.unit.gradient_of(self.whole)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self.whole.grad = None if gradient is None else gradient.as_subclass(GradientPart)
