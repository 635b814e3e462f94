"""A simulated rank gets copies of what a process would have copies of.

Without this, ranks that share one Python process would add into each other's tensors, and append to
each other's lists: `seen = []; simulate(lambda comm: seen.append(comm.rank), …)`.
"""

from __future__ import annotations

import copy
import dataclasses
import dis
import enum
import functools
import os
import sysconfig
from collections.abc import Callable, Iterator, Set
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

import cloudpickle
import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from dtlab.errors import ConfigError
from dtlab.tracebacks import PACKAGE

_HOLDERS = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, LRScheduler)
_CONSTANT = (NoneType, bool, int, float, complex, str, bytes, range, slice, EllipsisType, type,
             ModuleType, BuiltinFunctionType, enum.Enum, torch.dtype, torch.device, torch.Size,
             np.dtype, np.generic, np.ufunc)
_PLAIN = frozenset((NoneType, bool, int, float, str))
_INSTALLED = (PACKAGE, "<frozen ", *(sysconfig.get_path(kind) + os.sep
                                     for kind in ("stdlib", "purelib", "platlib")))
_SETS_GLOBAL = ("STORE_GLOBAL", "DELETE_GLOBAL")
_SETS_OUTER = ("STORE_DEREF", "DELETE_DEREF")
_GETS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")


def private(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with its own copies of what can change: see `Isolation`."""
    return Isolation(fn, ()).copies()[0]


class Isolation:
    """Makes, for one rank after the other, its own `fn` and `args`.

    Each rank has its own copy of whatever can change of `args`, and of the closures, defaults and
    global variables of `fn` and of all functions that it refers to; also of the variables that they
    assign to. Ranks share what never changes, modules, classes (so a method sees the caller's
    globals), and the globals of installed packages. `copies` raises `ConfigError` for an object
    that can neither be copied nor pickled.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]):
        self._fn, self._args = fn, args
        self._constant: dict[int, bool] = {}
        self._names: dict[CodeType, list[str]] = {}
        self._assigned = {variable for changing in _changing((fn, args), set())
                          if isinstance(changing, FunctionType)
                          for variable in _assigned_by(changing)}

    def copies(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The next rank's. What is met twice is copied once: an optimizer and the model whose
        parameters it holds still belong together."""
        copier = _Copier(self)
        fn = copier.own(self._fn, "the function")
        return fn, tuple(copier.own(value, f"argument {number}")
                         for number, value in enumerate(self._args, start=1))

    def check_memory(self, ranks: int) -> None:
        """Raise `ConfigError` if the memory of this machine can't hold the copies of all ranks."""
        seen: set[int] = set()
        nbytes = {place: size for value in (self._fn, *self._args)
                  for changing in _changing(value, seen) for place, size in _memory(changing)}
        each, there = sum(nbytes.values()), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if each * ranks > there:
            raise ConfigError(
                f"{ranks} ranks need a copy each of {each:,} bytes of tensors, more than the "
                f"{there:,} bytes of this machine; make smaller tensors on each rank, or tensors "
                f'without data (device="meta") when only time matters'
            )

    def is_constant(self, value: Any) -> bool:
        """May all ranks share it?"""
        if isinstance(value, _CONSTANT):
            return True
        known = self._constant.get(id(value))
        if known is None:
            known = self._constant[id(value)] = next(
                _changing(value, set(), self._assigned), self) is self
        return known

    def global_names(self, fn: FunctionType) -> list[str]:
        """The global variables that `fn` refers to, and has."""
        if fn.__code__ not in self._names:
            self._names[fn.__code__] = sorted(_global_names(fn))
        return self._names[fn.__code__]


class _Copier:
    """Makes the copies of one rank."""

    def __init__(self, isolation: Isolation):
        self._isolation = isolation
        self._memo: dict[int, Any] = {}  # of copy.deepcopy
        self._scopes: dict[int, dict[str, Any]] = {}  # copies of the globals of a file, by id
        self._cells: dict[int, CellType] = {}

    def own(self, value: Any, where: str) -> Any:
        """`value` as this rank sees it; where: what it is, for the error."""
        if self._isolation.is_constant(value):
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, functools.partial):
            args = [self.own(arg, where) for arg in value.args]
            return functools.partial(self.own(value.func, where), *args,
                                     **self.own(value.keywords, where))
        if isinstance(value, MethodType):
            return MethodType(self.own(value.__func__, where), self.own(value.__self__, where))
        if type(value) is tuple:
            return tuple(self.own(item, where) for item in value)
        if type(value) is list:
            self._memo[id(value)] = items = []
            plain = _PLAIN.issuperset(map(type, value))  # a million numbers are copied at once
            items += value if plain else [self.own(item, where) for item in value]
            return items
        if type(value) is dict:
            mapping: dict[Any, Any] = {}
            self._memo[id(value)] = mapping
            mapping |= {self.own(key, where): self.own(item, where) for key, item in value.items()}
            return mapping
        self._memo[id(value)] = copied = self._copied(value, where)
        return copied

    def _function(self, fn: FunctionType) -> FunctionType:
        cells = tuple(self._cells.setdefault(id(cell), CellType()) for cell in fn.__closure__ or ())
        scope = fn.__globals__
        if not _is_installed(fn):
            scope = self._scopes.setdefault(id(scope), dict(scope))
        function = FunctionType(fn.__code__, scope, fn.__name__, None, cells)
        self._memo[id(fn)] = function  # known before its contents, which may refer to it
        function.__qualname__, function.__module__ = fn.__qualname__, fn.__module__
        where = f"a default of `{fn.__name__}`"
        function.__defaults__ = self.own(fn.__defaults__, where)
        function.__kwdefaults__ = self.own(fn.__kwdefaults__, where)
        for name, own, cell in zip(fn.__code__.co_freevars, cells, fn.__closure__ or (),
                                   strict=True):
            for value in _content(cell):
                if not _is_installed(fn) or _is_followed(value):
                    value = self.own(value, f"variable `{name}` used by `{fn.__name__}`")
                own.cell_contents = value
        if not _is_installed(fn):
            for name in self._isolation.global_names(fn):
                where = f"global `{name}` used by `{fn.__name__}`"
                scope[name] = self.own(fn.__globals__[name], where)
            for name, value in vars(fn).items():
                setattr(function, name, self.own(value, f"attribute `{name}` of `{fn.__name__}`"))
        return function

    def _copied(self, value: Any, where: str) -> Any:
        """A deep copy, or what a process would get, if there is none."""
        if isinstance(value, torch.Tensor) and not value.is_leaf:  # torch copies only leaves
            return value.detach().clone().requires_grad_()
        known = len(self._memo)
        try:
            return copy.deepcopy(value, self._memo)
        except Exception:
            for half_made in list(self._memo)[known:]:
                del self._memo[half_made]
        try:
            return cloudpickle.loads(cloudpickle.dumps(value))
        except Exception as error:
            raise ConfigError(
                f"{where} is a {type(value).__name__}, of which the ranks can't have copies "
                f"({error}); create it inside the function instead"
            ) from None


def _changing(value: Any, seen: set[int], assigned: Set[Any] = frozenset()) -> Iterator[Any]:
    """What can change of `value` and of all it refers to, each once; a function if it assigns to a
    variable outside of it, or reads one that is `assigned`."""
    if isinstance(value, _CONSTANT) or id(value) in seen:
        return
    seen.add(id(value))
    parts: Any
    if isinstance(value, FunctionType):
        if not _is_installed(value) and (any(_assigned_by(value)) or vars(value)
                                         or not assigned.isdisjoint(_variables(value))):
            yield value
        parts = _referred(value)
    elif isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        parts = (value.__func__, value.__self__)
    elif type(value) in (tuple, frozenset) or (
            isinstance(value, tuple) and hasattr(type(value), "_fields")):
        parts = value
    elif dataclasses.is_dataclass(type(value)) and type(value).__dataclass_params__.frozen:
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        yield value
        parts = value if type(value) is list else value.values() if type(value) is dict else ()
    for part in parts:
        yield from _changing(part, seen, assigned)


def _referred(fn: FunctionType) -> Iterator[Any]:
    """What `fn` may read beside its arguments."""
    held = [value for cell in fn.__closure__ or () for value in _content(cell)]
    held += [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    if _is_installed(fn):
        yield from filter(_is_followed, held)
    else:
        yield from (*held, *(fn.__globals__[name] for name in _global_names(fn)))


def _is_installed(fn: FunctionType) -> bool:
    return fn.__code__.co_filename.startswith(_INSTALLED)


def _is_followed(value: Any) -> bool:
    """Is it copied although an installed function holds it: a decorated function, or tensors?"""
    return isinstance(value, FunctionType) or _holds_tensors(value)


def _global_names(fn: FunctionType) -> set[str]:
    steps = _steps(fn.__code__)
    return {step.argval for step in steps if step.opname in _GETS_GLOBAL} & fn.__globals__.keys()


def _variables(fn: FunctionType) -> list[tuple[int, str]]:
    """The variables outside of it that `fn` refers to: (whose, name)."""
    return [(id(cell), name) for name, cell in _cells(fn)] + [
        (id(fn.__globals__), name) for name in _global_names(fn)]


def _assigned_by(fn: FunctionType) -> Iterator[tuple[int, str]]:
    """The variables outside of it, global or of a function around it, that `fn` sets."""
    cells = dict(_cells(fn))
    for step in _steps(fn.__code__):
        if step.opname in _SETS_GLOBAL:
            yield id(fn.__globals__), step.argval
        elif step.opname in _SETS_OUTER and step.argval in cells:
            yield id(cells[step.argval]), step.argval


def _cells(fn: FunctionType) -> Iterator[tuple[str, CellType]]:
    return zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    """The instructions of `code` and of the functions defined inside it."""
    yield from dis.get_instructions(code)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _steps(const)


def _content(cell: CellType) -> Iterator[Any]:
    """What the variable of a closure holds; nothing if it isn't assigned yet."""
    with suppress(ValueError):
        yield cell.cell_contents


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, (list, tuple, set)):
        return any(map(_holds_tensors, value))
    return isinstance(value, _HOLDERS)


def _memory(value: Any) -> Iterator[tuple[int, int]]:
    """(address, bytes) of the data of a tensor, a module or an array."""
    if isinstance(value, torch.nn.Module):
        for tensor in (*value.parameters(), *value.buffers()):
            yield from _memory(tensor)
    elif isinstance(value, np.ndarray):
        yield value.ctypes.data, value.nbytes
    elif (isinstance(value, torch.Tensor) and value.layout is torch.strided
          and not value.is_meta):
        yield value.untyped_storage().data_ptr(), value.untyped_storage().nbytes()
