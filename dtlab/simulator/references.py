"""What a value refers to: objects, functions, and the variables that functions read and assign."""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import itertools
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    EllipsisType,
    FunctionType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from dtlab.tracebacks import PACKAGE

HOLDERS = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, LRScheduler)
CACHED = type(functools.lru_cache(len))
CONSTANT = (NoneType, bool, int, float, complex, str, bytes, range, slice, EllipsisType, enum.Enum,
            torch.dtype, torch.device, torch.Size, np.dtype, np.generic, np.ufunc)
_INSTALLED = (PACKAGE, "<frozen ", *(sysconfig.get_path(kind) + os.sep
                                     for kind in ("stdlib", "purelib", "platlib")))
_SETS_GLOBAL = ("STORE_GLOBAL", "DELETE_GLOBAL")
_SETS_OUTER = ("STORE_DEREF", "DELETE_DEREF")
_GETS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_GETS_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR")


def reachable(value: Any, seen: set[int]) -> Iterator[Any]:
    """`value` and all that it refers to, each once; but no constants such as numbers."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if not isinstance(value, CONSTANT) and id(value) not in seen:
            seen.add(id(value))
            yield value
            waiting += _parts(value)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, FunctionType):
        yield from (part for _, part in referred(value))
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, CACHED):
        yield value.__wrapped__
    elif isinstance(value, BuiltinFunctionType):
        if is_bound(value):
            yield value.__self__
    elif isinstance(value, type):
        if not is_installed(value):
            yield from (*methods(value), *value.__bases__)
    elif isinstance(value, ModuleType):
        pass  # see `referred`
    elif is_frozen(value) and not isinstance(value, tuple):
        yield type(value)
        yield from (getattr(value, field.name, None) for field in dataclasses.fields(value))
    else:
        yield type(value)
        if isinstance(value, (tuple, frozenset, list, set)):
            yield from value
        elif isinstance(value, dict):
            yield from dict.values(value)
        yield from getattr(value, "__dict__", {}).values()


def is_bound(builtin: BuiltinFunctionType) -> bool:
    """Is it a method of something that can change, such as `seen.append`?"""
    return isinstance(builtin.__self__, (list, dict, set, np.ndarray, *HOLDERS))


def is_frozen(value: Any) -> bool:
    """Can `value` not change, if what it refers to doesn't?"""
    kind = type(value)
    params = getattr(kind, "__dataclass_params__", None)
    return (kind in (tuple, frozenset) or (isinstance(value, tuple) and hasattr(kind, "_fields"))
            or (params is not None and params.frozen))


def is_installed(value: Any) -> bool:
    """Does this function, class or module come with Python, with dtlab, or with another package?"""
    if isinstance(value, FunctionType):
        return value.__code__.co_filename.startswith(_INSTALLED)
    module = sys.modules.get(value.__module__) if isinstance(value, type) else value
    if module is None or module.__name__ == "__main__":
        return False
    place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return type(module) is not ModuleType or place is None or place.startswith(_INSTALLED)


def is_followed(value: Any) -> bool:
    """Is it copied although an installed function holds it: a decorated function, or tensors?"""
    return isinstance(value, FunctionType) or _holds_tensors(value)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, (list, tuple, set)):
        return any(map(_holds_tensors, value))
    return isinstance(value, HOLDERS)


def referred(fn: FunctionType) -> Iterator[tuple[str, Any]]:
    """(what it is, value) of all that `fn` may read beside its arguments."""
    held = [(f"variable `{name}` used by `{fn.__name__}`", value)
            for name, cell in _cells(fn) for value in cell_contents(cell)]
    held += [(f"a default of `{fn.__name__}`", value)
             for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())]
    if is_installed(fn):
        yield from (pair for pair in held if is_followed(pair[1]))
        return
    yield from held
    yield from ((f"attribute `{name}` of `{fn.__name__}`", value)
                for name, value in vars(fn).items())
    yield from ((f"global `{name}` used by `{fn.__name__}`", fn.__globals__[name])
                for name in global_names(fn))
    for module in modules(fn):
        yield from ((f"`{module.__name__}.{name}` used by `{fn.__name__}`", vars(module)[name])
                    for name in attributes(fn, module))


def modules(fn: FunctionType) -> list[ModuleType]:
    """The modules that `fn` refers to and that don't come with a package: a person's own files."""
    found: list[ModuleType] = []
    waiting = [fn.__globals__[name] for name in global_names(fn)]
    waiting += [value for _, cell in _cells(fn) for value in cell_contents(cell)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, ModuleType) and not is_installed(value) and value not in found:
            found.append(value)
            waiting += [vars(value)[name] for name in attributes(fn, value)]
    return found


def methods(cls: type) -> Iterator[FunctionType]:
    """The functions of the methods and properties that `cls` defines."""
    for value in vars(cls).values():
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(value, FunctionType):
            yield value


def global_names(fn: FunctionType) -> list[str]:
    """The global variables that `fn` refers to, and has."""
    names = {step.argval for step in _steps(fn.__code__) if step.opname in _GETS_GLOBAL}
    return sorted(names & fn.__globals__.keys())


def attributes(fn: FunctionType, module: ModuleType) -> list[str]:
    """What `fn` may refer to of `module`."""
    names = {step.argval for step in _steps(fn.__code__) if step.opname in _GETS_ATTRIBUTE}
    return sorted(names & vars(module).keys())


def dynamic_lookup(fn: FunctionType) -> str | None:
    """The name of a function by which `fn` gets at variables that it doesn't name, if any."""
    names = {step.argval for step in _steps(fn.__code__) if step.opname in _GETS_GLOBAL}
    return next(iter(names & {"globals", "eval", "exec"} - fn.__globals__.keys()), None)


def variables(fn: FunctionType) -> list[tuple[int, str]]:
    """The variables outside of it that `fn` refers to: (whose, name)."""
    return [(id(cell), name) for name, cell in _cells(fn)] + [
        (id(fn.__globals__), name) for name in global_names(fn)]


def assigned_by(fn: FunctionType) -> Iterator[tuple[int, str]]:
    """The variables outside of it, global or of a function around it, that `fn` sets."""
    cells = dict(_cells(fn))
    for step in _steps(fn.__code__):
        if step.opname in _SETS_GLOBAL:
            yield id(fn.__globals__), step.argval
        elif step.opname in _SETS_OUTER and step.argval in cells:
            yield id(cells[step.argval]), step.argval


def _cells(fn: FunctionType) -> Iterator[tuple[str, CellType]]:
    return zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)


def cell_contents(cell: CellType) -> Iterator[Any]:
    """What the variable of a closure holds; nothing if it isn't assigned yet."""
    with suppress(ValueError):
        yield cell.cell_contents


@functools.lru_cache(1000)
def _steps(code: CodeType) -> tuple[dis.Instruction, ...]:
    """The instructions of `code` and of the functions defined inside it."""
    inside = [_steps(const) for const in code.co_consts if isinstance(const, CodeType)]
    return tuple(itertools.chain(dis.get_instructions(code), *inside))
