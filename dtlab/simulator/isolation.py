"""A simulated rank gets copies of what a process would have copies of.

Without this, ranks that share one Python process would add into each other's tensors, and append to
each other's lists: `seen = []; simulate(lambda comm: seen.append(comm.rank), …)`.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator, Set
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import cloudpickle
import numpy as np
import torch

from dtlab.errors import ConfigError
from dtlab.simulator import references
from dtlab.simulator.references import CACHED, CONSTANT, reachable

_PLAIN = frozenset((NoneType, bool, int, float, str))


def private(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with its own copies of what can change: see `Isolation`."""
    return Isolation(fn, ()).copies()[0]


class Isolation:
    """Makes, for one rank after the other, its own `fn` and `args`.

    Each rank has its own copy of whatever can change of `args`, and of the closures, defaults and
    global variables of `fn` and of all functions that it refers to, also in a person's own modules;
    and of the variables that they assign to. Ranks share what never changes, classes, and the
    modules of installed packages; `check_shared` looks whether they have changed a class.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]):
        self._fn, self._args = fn, args
        self._constant: dict[int, bool] = {}
        self._reachable = list(reachable((fn, args), set()))
        self._assigned = {variable for value in self._reachable
                          if isinstance(value, FunctionType) and not references.is_installed(value)
                          for variable in references.assigned_by(value)}
        self._shared = self._state_of_classes()

    def copies(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The next rank's. What is met twice is copied once: an optimizer and the model whose
        parameters it holds still belong together. Raises `ConfigError` for an object that can
        neither be copied nor pickled."""
        copier = _Copier(self)
        try:
            fn = copier.own(self._fn, "the function")
            return fn, tuple(copier.own(value, f"argument {number}")
                             for number, value in enumerate(self._args, start=1))
        except RecursionError:
            raise ConfigError("something that the function uses is nested too deeply for each rank "
                              "to have a copy; create it inside the function instead") from None

    def check_memory(self, ranks: int) -> None:
        """Raise `ConfigError` if the memory of this machine can't hold the copies of all ranks."""
        nbytes = {place: size for value in self._reachable for place, size in _memory(value)}
        each, there = sum(nbytes.values()), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if each * ranks > there:
            raise ConfigError(
                f"{ranks} ranks need a copy each of {each:,} bytes of tensors, more than the "
                f"{there:,} bytes of this machine; make smaller tensors on each rank, or tensors "
                f'without data (device="meta") when only time matters'
            )

    def check_shared(self) -> None:
        """Raise `ConfigError` if the ranks have changed what they share through a class."""
        for what, state in self._state_of_classes().items():
            if state != self._shared.get(what):
                raise ConfigError(f"a rank has changed {what}, which all simulated ranks share, as "
                                  f"they share classes; keep it in an object (`self`), or define "
                                  f"the class inside the function")

    def is_constant(self, value: Any) -> bool:
        """May all ranks share it?"""
        if isinstance(value, CONSTANT):
            return True
        known = self._constant.get(id(value))
        if known is None:
            known = self._constant[id(value)] = not any(
                _changes(part, self._assigned) for part in reachable(value, set()))
        return known

    def _state_of_classes(self) -> dict[str, bytes]:
        """Of a person's classes: what they hold, and the globals that their methods read or set."""
        values: dict[str, Any] = {}
        for cls in self._reachable:
            if isinstance(cls, type) and not references.is_installed(cls):
                values |= {f"`{cls.__name__}.{name}`": value for name, value in vars(cls).items()
                           if not (name.startswith("__") or hasattr(value, "__get__"))}
                for fn in references.methods(cls):
                    values |= references.referred(fn)
        return {what: _pickled(value) for what, value in values.items()
                if not isinstance(value, (FunctionType, type, ModuleType))}


class _Copier:
    """Makes the copies of one rank."""

    def __init__(self, isolation: Isolation):
        self._isolation = isolation
        self._memo = _Memo(self)
        self._modules: dict[int, ModuleType] = {}  # by the id of the globals of the original
        self._cells: dict[int, CellType] = {}

    def own(self, value: Any, where: str) -> Any:
        """`value` as this rank sees it; where: what it is, for the error."""
        if self._isolation.is_constant(value):
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, ModuleType):
            return self._module(vars(value))
        if isinstance(value, CACHED):
            cache = functools.lru_cache(**value.cache_parameters())
            copied = self._memo[id(value)] = cache(self.own(value.__wrapped__, where))
            return copied
        if isinstance(value, BuiltinFunctionType):
            return getattr(self.own(value.__self__, where), value.__name__)
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
        installed = references.is_installed(fn)
        scope = fn.__globals__ if installed else vars(self._module(fn.__globals__))
        function = FunctionType(fn.__code__, scope, fn.__name__, None, cells)
        self._memo[id(fn)] = function  # known before its contents, which may refer to it
        function.__qualname__, function.__module__ = fn.__qualname__, fn.__module__
        where = f"a default of `{fn.__name__}`"
        function.__defaults__ = self.own(fn.__defaults__, where)
        function.__kwdefaults__ = self.own(fn.__kwdefaults__, where)
        for name, own, cell in zip(fn.__code__.co_freevars, cells, fn.__closure__ or (),
                                   strict=True):
            for value in references.cell_contents(cell):
                if not installed or references.is_followed(value):
                    value = self.own(value, f"variable `{name}` used by `{fn.__name__}`")
                own.cell_contents = value
        if not installed:
            self._variables(fn, scope)
            for name, value in vars(fn).items():
                setattr(function, name, self.own(value, f"attribute `{name}` of `{fn.__name__}`"))
        return function

    def _variables(self, fn: FunctionType, scope: dict[str, Any]) -> None:
        """Fill `scope` with what `fn` uses of its globals, and of a person's own modules."""
        if lookup := references.dynamic_lookup(fn):
            raise ConfigError(f"`{fn.__name__}` calls {lookup}(), so simulate can't see which "
                              f"variables each rank needs a copy of; name them instead")
        for name in references.global_names(fn):
            scope[name] = self.own(fn.__globals__[name], f"global `{name}` used by `{fn.__name__}`")
        for module in references.modules(fn):
            for name in references.attributes(fn, module):
                where = f"`{module.__name__}.{name}` used by `{fn.__name__}`"
                vars(self._module(vars(module)))[name] = self.own(vars(module)[name], where)

    def _module(self, scope: dict[str, Any]) -> ModuleType:
        """The copy of the file with these globals; they are copied when a function needs them."""
        if id(scope) not in self._modules:
            self._modules[id(scope)] = ModuleType(scope.get("__name__", ""))
            vars(self._modules[id(scope)]).update(scope)
        return self._modules[id(scope)]

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


class _Memo(dict[int, Any]):
    """What `copy.deepcopy` has copied; inside an object, too, functions are the rank's own."""

    def __init__(self, copier: _Copier):
        super().__init__()
        self.copier = copier


def _own(value: Any, memo: Any) -> Any:
    """In place of what `copy.deepcopy` never copies."""
    return memo.copier.own(value, "something") if isinstance(memo, _Memo) else value


for _kind in (FunctionType, BuiltinFunctionType, CACHED, ModuleType):
    copy._deepcopy_dispatch[_kind] = _own  # type: ignore[attr-defined]


def _changes(value: Any, assigned: Set[Any]) -> bool:
    """Can this change, itself? A function does if it assigns to a variable outside of it, or reads
    one that is `assigned`."""
    if isinstance(value, FunctionType):
        return not references.is_installed(value) and bool(
            any(references.assigned_by(value)) or vars(value) or references.dynamic_lookup(value)
            or not assigned.isdisjoint(references.variables(value)))
    if isinstance(value, ModuleType):
        return not references.is_installed(value)
    return not (isinstance(value, (type, functools.partial, MethodType, BuiltinFunctionType))
                or references.is_frozen(value))


def _pickled(value: Any) -> bytes:
    """Something to see by whether `value` has changed; always the same if it can't be pickled."""
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception:
        return b""


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
