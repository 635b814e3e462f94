"""Hooks of modules and parameters, which end with what they belong to, and of backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from dtlab.errors import ConfigError


class Hook:
    """A hook of a module: `run` it. A copy of the module, or one that is loaded from a file, has
    parameters of its own, and a hook that does nothing."""

    def __init__(self, run: Callable[..., Any] = lambda *_: None):
        self.run = run

    def __call__(self, *args: Any) -> None:
        self.run(*args)

    def __reduce__(self) -> Any:
        return Hook, ()


class GradientHook:
    """A hook of a parameter: run a method, as long as its object is there. Autograd hides from
    Python's collector what its hooks hold: a model that held itself so would never be freed."""

    def __init__(self, run: Callable[[Any], None]):
        self.run = WeakMethod(run)

    def __call__(self, p: Tensor) -> None:
        if run := self.run():
            run(p)


def owners_of(p: Tensor) -> list[Any]:
    """Return the objects whose methods are `GradientHook`s of `p`."""
    hooks = (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()
    runs = [hook.run() for hook in hooks if isinstance(hook, GradientHook)]
    return [run.__self__ for run in runs if run]  # type: ignore[attr-defined]


def in_autograd() -> bool:
    """Does backward run, also one that doesn't reduce?"""
    return bool(torch._C._current_graph_task_id() != -1)


def before_backward_of(outputs: Any, run: Callable[[Tensor], Any]) -> None:
    """Call `run` in each backward, once it has the gradient of one of the tensors in `outputs`."""
    ends = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
    if ends:
        register_multi_grad_hook(ends, run, mode="any")


def refuse_in_backward(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise `ConfigError`, before any optimizer's step, if its gradients are being reduced."""
    if in_autograd() and any(owners_of(p) for g in optimizer.param_groups for p in g["params"]):
        raise ConfigError("an optimizer's step within backward would use this rank's gradients, "
                          "not those of all ranks; step the optimizer after backward")


register_optimizer_step_pre_hook(refuse_in_backward)
