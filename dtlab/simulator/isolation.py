"""A simulated rank gets copies of what a process would have copies of.

Without this, ranks that share one Python process would add into each other's tensors:
`x = torch.ones(8); simulate(lambda comm: all_reduce(comm, x), …)`.
"""

from __future__ import annotations

import copy
import dis
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from dtlab.errors import ConfigError

_HOLDERS = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, LRScheduler)


def private(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with its own copies of what holds tensors: see `Isolation`."""
    return Isolation(fn, ()).copies()[0]


class Isolation:
    """Makes, for one rank after the other, its own `fn` and `args`.

    args: deep copies. fn: reads its own copies of the tensors, modules and optimizers, also in
    lists and dicts, that it finds in its closure and globals, and so do the functions of the same
    file that it calls. Global variables that it assigns to are its own. Anything else it refers to
    stays shared, and so does what code in other files refers to.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]):
        self._fn, self._args = fn, args
        self._readers: dict[int, bool] = {}  # id of a function → must each rank have its own?

    def copies(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The next rank's. What is met twice is copied once: an optimizer and the model whose
        parameters it holds still belong together."""
        copier = _Copier(self._readers)
        return copier.function(self._fn), tuple(copier.copied(value) for value in self._args)

    def check_memory(self, ranks: int) -> None:
        """Raise `ConfigError` if the memory of this machine can't hold the copies of all ranks."""
        nbytes = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for value in (*self._args, *_reads(self._fn, set()))
            for tensor in _tensors(value) if tensor.layout is torch.strided and not tensor.is_meta
        }
        each, there = sum(nbytes.values()), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if each * ranks > there:
            raise ConfigError(
                f"{ranks} ranks need a copy each of {each:,} bytes of tensors, more than the "
                f"{there:,} bytes of this machine; make smaller tensors on each rank, or tensors "
                f'without data (device="meta") when only time matters'
            )


class _Copier:
    """Makes the copies of one rank."""

    def __init__(self, readers: dict[int, bool]):
        self._readers = readers
        self._memo: dict[int, Any] = {}  # of copy.deepcopy
        self._scopes: dict[int, dict[str, Any]] = {}  # copies of the globals of a file, by id
        self._functions: dict[int, FunctionType] = {}

    def function(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` itself if it reads no tensors and sets no globals, else a copy with its own."""
        if id(fn) not in self._readers:
            self._readers[id(fn)] = any(
                _assigns_globals(value.__code__) if isinstance(value, FunctionType)
                else _holds_tensors(value) for value in _reads(fn, set())
            )
        if not self._readers[id(fn)]:
            return fn
        if isinstance(fn, functools.partial):
            args = [self.copied(value) for value in fn.args]
            return functools.partial(self.function(fn.func), *args, **self.copied(fn.keywords))
        if isinstance(fn, MethodType):
            return MethodType(self.function(fn.__func__), self.copied(fn.__self__))
        if isinstance(fn, FunctionType):
            return self._functions.get(id(fn)) or self._copy_of(fn)
        return self.copied(fn)  # type: ignore[no-any-return]  # an object that can be called

    def _copy_of(self, fn: FunctionType) -> FunctionType:
        scope = self._scopes.setdefault(id(fn.__globals__), dict(fn.__globals__))
        cells = tuple(CellType() for _ in fn.__closure__ or ())
        function = FunctionType(fn.__code__, scope, fn.__name__, None, cells)
        self._functions[id(fn)] = function  # known before its contents, which may refer to it
        function.__defaults__ = self.copied(fn.__defaults__)
        function.__kwdefaults__ = self.copied(fn.__kwdefaults__)
        for own, cell in zip(cells, fn.__closure__ or (), strict=True):
            for value in _content(cell):
                own.cell_contents = self._own(value)
        for name, value in _globals_of(fn):
            scope[name] = self._own(value)
        return function

    def _own(self, value: Any) -> Any:
        """`value` as the copy of a function sees it."""
        if isinstance(value, FunctionType):
            return self.function(value)
        return self.copied(value) if _holds_tensors(value) else value

    def copied(self, value: Any) -> Any:
        """A deep copy; `value` itself if it has none (a lock, an open file)."""
        if isinstance(value, torch.Tensor) and not value.is_leaf:  # torch copies only leaves
            return value.detach().clone().requires_grad_()
        try:
            return copy.deepcopy(value, self._memo)
        except Exception:  # whatever a foreign class raises: better shared than refused
            return value


def _reads(fn: Any, seen: set[int]) -> Iterator[Any]:
    """`fn`, the functions beside it that it calls, and what they may read beside arguments."""
    if id(fn) in seen:
        return
    seen.add(id(fn))
    if isinstance(fn, functools.partial):
        yield from (*fn.args, *fn.keywords.values())
        yield from _reads(fn.func, seen)
    elif isinstance(fn, MethodType):
        yield from vars(fn.__self__).values() if hasattr(fn.__self__, "__dict__") else ()
        yield from _reads(fn.__func__, seen)
    elif isinstance(fn, FunctionType):
        yield fn
        contents = [value for cell in fn.__closure__ or () for value in _content(cell)]
        defaults = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
        for value in (*contents, *defaults, *(value for _, value in _globals_of(fn))):
            if isinstance(value, FunctionType):
                yield from _reads(value, seen)
            else:
                yield value
    else:
        yield from (fn, *(vars(fn).values() if hasattr(fn, "__dict__") else ()))


def _globals_of(fn: FunctionType) -> Iterator[tuple[str, Any]]:
    """The global variables that `fn` names, and functions if they stand in the same file."""
    for name in sorted(_names(fn.__code__)):
        if name in fn.__globals__:
            value = fn.__globals__[name]
            if not isinstance(value, FunctionType) or value.__globals__ is fn.__globals__:
                yield name, value


def _names(code: CodeType) -> set[str]:
    """The names that `code` and the functions defined inside it use."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _assigns_globals(code: CodeType) -> bool:
    """Does `code`, or a function defined inside it, say `global x` and set it?"""
    opcodes = {step.opname for step in dis.get_instructions(code)}
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return not opcodes.isdisjoint(("STORE_GLOBAL", "DELETE_GLOBAL")) or any(
        map(_assigns_globals, inner)
    )


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


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in `value`, as far as `_holds_tensors` looks."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, (list, tuple, set, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
