"""A simulated rank gets copies of what a process would have copies of.

Without this, ranks that share one Python process would add into each other's tensors:
`x = torch.ones(8); simulate(lambda comm: all_reduce(comm, x), …)`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch


def private(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with its own copies of the tensors and modules that it closes over or reads as globals.

    Other objects it refers to stay shared; so do those of functions that it calls.
    """
    if isinstance(fn, functools.partial):
        return functools.partial(
            private(fn.func), *copied(fn.args), **copied(fn.keywords)
        )
    if not isinstance(fn, FunctionType):
        return fn
    names = [n for n in fn.__code__.co_names if _holds_tensors(fn.__globals__.get(n))]
    cells = fn.__closure__ or ()
    if not names and not any(_holds_tensors(_content(cell)) for cell in cells):
        return fn
    scope = fn.__globals__
    if names:
        scope = scope | {name: copied(scope[name]) for name in names}
    own = tuple(
        CellType(copied(_content(cell))) if _holds_tensors(_content(cell)) else cell
        for cell in cells
    )
    twin = FunctionType(fn.__code__, scope, fn.__name__, copied(fn.__defaults__), own)
    twin.__kwdefaults__ = copied(fn.__kwdefaults__)
    return twin


def copied(value: Any) -> Any:
    """A deep copy; `value` itself if it has none (a lock, a tensor in the middle of a graph)."""
    try:
        return copy.deepcopy(value)
    except Exception:  # whatever a foreign class raises: better shared than refused
        return value


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that isn't assigned yet
        return None


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return True
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_holds_tensors, value))
