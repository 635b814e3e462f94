"""Objects on their way between processes: pickled, with large arrays beside the pickle.

`pack` writes an object into an anonymous memory file; `unpack` maps it. So a large tensor is
copied once on its way in, and not at all on its way out: the receivers share its pages until they
write to them (MAP_PRIVATE), which changes only their own copy.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import mmap
import os
import pickle
import struct
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch

from dtlab.errors import ConfigError
from dtlab.processes.registered import Registered, registered
from dtlab.tracebacks import PACKAGE

_LARGE = 1 << 15  # bytes; below, a copy is cheaper than a place of its own
_ALIGN = 64
_COUNTS = struct.Struct("<QQ")  # bytes of pickle, number of buffers
_registry = threading.Lock()  # cloudpickle's list of modules that go by value
_PLACE = struct.Struct("<QQ")  # offset and size of a buffer


def memory_file(name: str) -> int:
    """A file without a name, in memory where the system can: gone with its last user."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())


# ---- pack and unpack ----------------------------------------------------------------------------


def pack(value: Any) -> int:
    """`value` in a new memory file; returns its descriptor. Raises whatever pickling raises."""
    buffers: list[memoryview] = []
    pickled = _dump(value, buffers)
    places, end = [], _COUNTS.size + _PLACE.size * len(buffers) + len(pickled)
    for buffer in buffers:
        start = -(-end // _ALIGN) * _ALIGN
        places.append((start, buffer.nbytes))
        end = start + buffer.nbytes
    fd = memory_file("dtlab")
    try:
        head = _COUNTS.pack(len(pickled), len(buffers))
        _write(fd, head + b"".join(_PLACE.pack(*place) for place in places) + pickled, 0)
        for (start, _), buffer in zip(places, buffers, strict=True):
            _write(fd, buffer, start)
    except BaseException:
        os.close(fd)
        raise
    return fd


def unpack(fd: int, *, close: bool = True) -> Any:
    """What `pack` put into this file. Large arrays in it are private views of the file."""
    try:
        size = os.fstat(fd).st_size
        everything = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE)
    finally:
        if close:
            os.close(fd)
    view = memoryview(everything)
    length, count = _COUNTS.unpack_from(view)
    body = _COUNTS.size + _PLACE.size * count
    buffers = []
    for number in range(count):
        start, nbytes = _PLACE.unpack_from(view, _COUNTS.size + _PLACE.size * number)
        buffers.append(view[start : start + nbytes])
    return pickle.loads(view[body : body + length], buffers=buffers)


def _write(fd: int, data: bytes | memoryview, start: int) -> None:
    view = memoryview(data)
    while view:  # the kernel takes at most 2 GB at a time
        written = os.pwrite(fd, view, start)
        view, start = view[written:], start + written


def _dump(value: Any, buffers: list[memoryview]) -> bytes:
    def keep_aside(buffer: pickle.PickleBuffer) -> bool:
        """Called for each array: True leaves it in the pickle."""
        raw = buffer.raw()
        if raw.nbytes < _LARGE:
            return True
        buffers.append(raw)
        return False

    sink = io.BytesIO()
    _Pickler(sink, protocol=5, buffer_callback=keep_aside).dump(value)
    return sink.getvalue()


# Torch writes the pickle of a tensor of these dtypes, then can't read it: they go as integers.
_UNPICKLABLE = frozenset(torch.storage._new_dtypes())
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, which takes lambdas, closures and cells; tensors lend their memory.

    A tensor pickles as a view of its storage, so that tensors which share memory still do when
    they arrive. Torch itself would copy each storage. And functions that share a variable of the
    function around them (`nonlocal`) still do: cloudpickle itself would give each its own cell.
    """

    def _function_getnewargs(self, function: FunctionType) -> tuple[Any, ...]:
        *others, _ = super()._function_getnewargs(function)
        return *others, function.__closure__

    def reducer_override(self, x: Any) -> Any:
        """Asked for each object first; `NotImplemented` leaves it to cloudpickle."""
        if isinstance(x, torch.UntypedStorage) and x.device.type == "cpu":
            raw = torch.empty(0, dtype=torch.uint8).set_(x)
            return _rebuild_storage, (pickle.PickleBuffer(raw.numpy().data),)
        if isinstance(x, torch.storage.TypedStorage) and x._untyped_storage.device.type == "cpu":
            return _rebuild_typed_storage, (x._untyped_storage, x.dtype)
        if type(x) is torch.Tensor and x.dtype in _UNPICKLABLE and x.device.type == "cpu":
            return _rebuild_odd_tensor, (x.detach().view(_SAME_SIZE[x.itemsize]), x.dtype)
        if isinstance(x, CellType):  # its contents come last: they may lead back to it
            return CellType, (), _contents(x), None, None, _fill
        return super().reducer_override(x)


def _contents(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # the variable has no value yet
        return ()


def _fill(cell: CellType, contents: tuple[Any, ...]) -> None:
    if contents:
        (cell.cell_contents,) = contents


def _rebuild_odd_tensor(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.view(dtype)


def _rebuild_storage(buffer: Any) -> torch.UntypedStorage:
    if not len(buffer):
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _rebuild_typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


# ---- functions: by value where the ranks could not import them ----------------------------------


def pack_call(function: Callable[..., Any] | str, args: tuple[Any, ...]) -> int:
    """A function (or the source of a cell) and its arguments, in a memory file for `unpack_call`;
    with what is `registered`. `ConfigError` names what can't be pickled.

    The function's own module travels with it unless it is installed: a module that you are
    editing, a test or a script may be something else on disk, or not importable at all.
    """
    own = registered()
    functions = [function, *(part for _, part in own.parts())]
    if modules := set(map(own_module, functions)) - {None}:
        with _registry, contextlib.suppress(Exception):
            # If some global of one does not pickle, by reference it may still work.
            for module in modules:
                cloudpickle.register_pickle_by_value(module)
            try:
                return pack((own, function, args))
            finally:
                for module in modules:
                    cloudpickle.unregister_pickle_by_value(module)
    try:
        return pack((own, function, args))
    except Exception as error:
        where, culprit = _culprit(function, args, own)
        raise ConfigError(
            f"{where} can't be sent to the ranks: {type(culprit).__name__} {_short(culprit)} "
            f"can't be pickled ({error}); create it inside the function instead"
        ) from error


def unpack_call(fd: int) -> tuple[Any, tuple[Any, ...]]:
    """The function, or source, and its arguments; what came along is registered."""
    own, function, args = unpack(fd)
    own.register()
    return function, args


def own_module(function: Callable[..., Any] | str) -> ModuleType | None:
    """The module `function` was written in, if it isn't an installed one or `__main__`."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__module__", None) or type(function).__module__
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    known = cloudpickle.list_registry_pickle_by_value()
    if module is None or name == "__main__" or file is None or name in known:
        return None
    installed = {PACKAGE, *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))}
    if any(file.startswith(folder + os.sep) for folder in installed):
        return None
    return module


def _culprit(function: Any, args: tuple[Any, ...], own: Registered) -> tuple[str, Any]:
    """Where the first thing that does not pickle is, and the thing."""
    parts = [(f"the function {getattr(function, '__name__', function)!s}", function)]
    parts += [(f"argument {number}", value) for number, value in enumerate(args, start=1)]
    parts += own.parts()
    for where, value in parts:
        if not _pickles(value):
            return _innermost(where, value, depth=6)
    return parts[0]


def _innermost(where: str, value: Any, depth: int) -> tuple[str, Any]:
    for deeper, part in _parts(where, value) if depth else ():
        if not _pickles(part):
            return _innermost(deeper, part, depth - 1)
    return where, value


def _parts(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield f"the function of {where}", value.func
        yield from ((f"an argument of {where}", arg) for arg in value.args)
    elif isinstance(value, FunctionType):
        closure = inspect.getclosurevars(value)
        names = set(_global_names(value.__code__))
        for name in sorted(names & value.__globals__.keys()):
            yield f"global `{name}` used by `{value.__name__}`", value.__globals__[name]
        for name, inner in closure.nonlocals.items():
            yield f"variable `{name}` used by `{value.__name__}`", inner
        for inner in value.__defaults__ or ():
            yield f"a default of `{value.__name__}`", inner
    elif isinstance(value, dict):
        yield from ((f"{where}[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{where}[{number}]", inner) for number, inner in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType)):
        yield from ((f"{where}.{key}", inner) for key, inner in vars(value).items())


def _global_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _pickles(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        return ""
    return text if len(text) <= 60 else text[:59] + "…"
