"""Hooks that end with what they belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from torch import Tensor


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
    """Whose methods are `GradientHook`s of `p`."""
    hooks = (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()
    runs = [hook.run() for hook in hooks if isinstance(hook, GradientHook)]
    return [run.__self__ for run in runs if run]  # type: ignore[attr-defined]
