"""Pickles that keep what a function of a notebook refers to, and lend the memory of tensors."""

from __future__ import annotations

import functools
import io
import pickle
import random
import sys
from collections.abc import Iterable
from importlib import import_module
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakSet

import cloudpickle
import numpy as np
import torch
from cloudpickle.cloudpickle import _class_setstate, _code_reduce, _lookup_module_and_qualname

_LARGE = 1 << 15  # bytes; below, a copy is cheaper than a place of its own
# Torch writes the pickle of a tensor of these dtypes, then can't read it: they go as integers.
_UNPICKLABLE = frozenset(torch.storage._new_dtypes())
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CACHED = type(functools.lru_cache(len))
# Where a process has the generators that `random.seed` and the like seed: a rank has its own.
_GENERATORS = {id(getattr(module, name)): (module, name) for module, name in (
    (random, "_inst"), (np.random.mtrand, "_rand"), (torch, "default_generator"))}
_defined_here: WeakSet[type] = WeakSet()  # classes that have gone from this process by value
_arrived: WeakSet[type] = WeakSet()  # classes that have come to this process by value


class Pickled(NamedTuple):
    """An object as bytes; buffers: its large arrays, which still lie where they were."""

    data: bytes
    buffers: list[memoryview]


class ReadablePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, which writes no tensor that can't be read, and no generator of a process, whose
    methods are `random.shuffle` and the like."""

    def reducer_override(self, x: Any) -> Any:
        """Asked for each object first; `NotImplemented` leaves it to cloudpickle."""
        if id(x) in _GENERATORS:
            return getattr, _GENERATORS[id(x)]
        if type(x) is torch.Tensor and x.dtype in _UNPICKLABLE and x.device.type == "cpu":
            return _rebuild_odd_tensor, (x.detach().view(_SAME_SIZE[x.itemsize]), x.dtype)
        return super().reducer_override(x)


class Pickler(ReadablePickler):
    """cloudpickle, which takes lambdas, closures and cells; tensors lend their memory.

    A tensor pickles as a view of its storage, so that tensors which share memory still do when
    they arrive. Torch itself would copy each storage. Functions that share a variable of the
    function around them (`nonlocal`) still do: cloudpickle itself would give each its own cell.
    A class that comes back to the process in which it was defined is left as it is.
    lends: tensors lend their memory; else they are copied into the pickle.
    """

    def __init__(self, lends: bool = True) -> None:
        self._file = io.BytesIO()
        self._buffers: list[memoryview] = []
        # A method of this object would keep all that is pickled until Python looks for circles.
        keep = functools.partial(_keep_in_pickle, self._buffers) if lends else None
        super().__init__(self._file, protocol=5, buffer_callback=keep)

    def pickled(self, value: Any) -> Pickled:
        """Return `value`, pickled. Raises whatever pickling raises."""
        self.dump(value)
        return Pickled(self._file.getvalue(), self._buffers)

    def _function_getnewargs(self, function: FunctionType) -> tuple[Any, ...]:
        *others, _ = super()._function_getnewargs(function)
        return *others, function.__closure__

    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, torch.UntypedStorage) and x.device.type == "cpu":
            raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(x)
            # An array: Python before 3.13 may free a memoryview that a buffer still uses.
            return _rebuild_storage, (pickle.PickleBuffer(raw.numpy()),)  # type: ignore[arg-type]
        if isinstance(x, torch.storage.TypedStorage) and x._untyped_storage.device.type == "cpu":
            return _rebuild_typed_storage, (x._untyped_storage, x.dtype)
        if isinstance(x, CellType):  # its contents come last: they may lead back to it
            return CellType, (), _contents(x), None, None, _fill
        if isinstance(x, _CACHED) and (self._goes_by_value(x.__wrapped__)
                                       or _lookup_module_and_qualname(x) is None):
            return _rebuild_cached, (x.__wrapped__, x.cache_parameters())
        if isinstance(x, functools.cached_property):  # before Python 3.12 it holds a lock
            return functools.cached_property, (x.func,), {"attrname": x.attrname}
        if isinstance(x, ModuleType) and type(x) is not ModuleType:  # such as torch.classes
            return import_module, (x.__name__,)
        reduced = super().reducer_override(x)
        if isinstance(x, type) and isinstance(reduced, tuple) and reduced[-1] is _class_setstate:
            return self._reduced_class(x, reduced)
        return reduced

    def _goes_by_value(self, function: Any) -> bool:
        return self.reducer_override(function) is not NotImplemented

    def _reduced_class(self, cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        if cls not in _arrived:
            _defined_here.add(cls)
        return *reduced[:-1], _set_class_state


def _keep_in_pickle(buffers: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    """Asked for each array; False leaves it beside the pickle, in `buffers`."""
    raw = buffer.raw()
    if raw.nbytes < _LARGE:
        return True
    buffers.append(raw)
    return False


def _imported_submodules(code: CodeType, globals_: Iterable[Any]) -> list[ModuleType]:
    """The submodules that `code` may reach from the packages among its globals.

    cloudpickle's own function looks at every module of the process, for each of these packages:
    this took 5 ms for each function that a call refers to, longer than all else about the call.
    """
    names = [x.__name__ for x in globals_
             if isinstance(x, ModuleType) and getattr(x, "__package__", None)]
    packages = len(names)
    for name in names:  # which grows
        names += [below for part in code.co_names if (below := f"{name}.{part}") in sys.modules]
    return [sys.modules[name] for name in names[packages:]]


def _reduced_code(code: CodeType) -> tuple[Any, ...]:
    """Reduce code as cloudpickle does, and with the name of its file, which tracebacks show: from
    version 3.1.3 on, cloudpickle itself leaves it out."""
    build, arguments = _code_reduce(code)
    return build, (*arguments[:10], code.co_filename, *arguments[11:])


cloudpickle.cloudpickle._find_imported_submodules = _imported_submodules
cloudpickle.Pickler._dispatch_table[CodeType] = _reduced_code


def _set_class_state(cls: type, state: Any) -> None:
    """Fill a class that has come here, unless it has only come back."""
    if cls not in _defined_here:
        _arrived.add(cls)
        _class_setstate(cls, state)


def _contents(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # the variable has no value yet
        return ()


def _fill(cell: CellType, contents: tuple[Any, ...]) -> None:
    if contents:
        (cell.cell_contents,) = contents


def _rebuild_cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _rebuild_odd_tensor(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.view(dtype)


def _rebuild_storage(buffer: Any) -> torch.UntypedStorage:
    if not len(buffer):
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _rebuild_typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
