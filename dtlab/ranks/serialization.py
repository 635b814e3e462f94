"""Objects on their way between processes, and calls on their way to ranks.

`pack` writes an object into an anonymous memory file; `unpack` maps it. So a large tensor is
copied once on its way in, and not at all on its way out: the receivers share its pages until they
write to them (MAP_PRIVATE), which changes only their own copy.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import mmap
import os
import pickle
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

from dtlab.errors import ConfigError
from dtlab.ranks.own_code import own_module
from dtlab.ranks.pickling import Pickler
from dtlab.ranks.registered import Registered, registered

_ALIGN = 64
_COUNTS = struct.Struct("<QQ")  # bytes of pickle, number of buffers
_registry = threading.Lock()  # cloudpickle's list of modules that go by value
_BY_PARTS: object = object.__reduce__  # of objects that pickle as their attributes do
_PLACE = struct.Struct("<QQ")  # offset and size of a buffer


def memory_file(name: str) -> int:
    """A file without a name, in memory where the system can: gone with its last user."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())


# ---- pack and unpack ----------------------------------------------------------------------------


def pack(value: Any) -> int:
    """Put `value` in a new memory file; returns its descriptor. Raises whatever pickling raises."""
    pickled, buffers = Pickler().pickled(value)
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


def unpack(fd: int) -> Any:
    """Load what `pack` put into this file, and close it. Large arrays are private views of it."""
    try:
        size = os.fstat(fd).st_size
        everything = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE)
    finally:
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
    with refusing_by_name(function, args, own):
        return pack((own, function, args))


def unpack_call(fd: int) -> tuple[Any, tuple[Any, ...]]:
    """The function, or source, and its arguments; what came along is registered."""
    own, function, args = unpack(fd)
    own.register()
    return function, args


@contextmanager
def refusing_by_name(function: Any, args: tuple[Any, ...], own: Registered,
                     pickler: type[Pickler] = Pickler) -> Iterator[None]:
    """Inside, what can't be pickled of a call raises `ConfigError`, which names it."""
    try:
        yield
    except Exception as error:
        where, culprit = _culprit(function, args, own, pickler)
        raise ConfigError(
            f"{where} can't be sent to the ranks: {type(culprit).__name__} {_short(culprit)} "
            f"can't be pickled ({error}); create it inside the function instead"
        ) from error


@contextmanager
def sending_back(rank: int, value: Any) -> Iterator[None]:
    """Inside, what can't be pickled of the `value` that a rank returned raises `ConfigError`."""
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"rank {rank} returned a {type(value).__name__} that can't be sent back "
            f"({error}); return tensors, numbers, or other things that pickle"
        ) from None


def cannot_send(x: Any, error: Exception) -> ConfigError:
    """Return what to raise for the object `x`, which a rank sends and which didn't pickle."""
    _, culprit = _innermost("", x, Pickler, depth=6)
    return ConfigError(f"{type(culprit).__name__} {_short(culprit)} can't be sent: it can't be "
                       f"pickled ({error}); send tensors, numbers, or other things that pickle")


def _culprit(function: Any, args: tuple[Any, ...], own: Registered,
             pickler: type[Pickler]) -> tuple[str, Any]:
    """Find the first thing that does not pickle: its place, and the thing."""
    parts = [(f"the function {getattr(function, '__name__', function)!s}", function)]
    parts += [(f"argument {number}", value) for number, value in enumerate(args, start=1)]
    parts += own.parts()
    for where, value in parts:
        if not _pickles(value, pickler):
            return _innermost(where, value, pickler, depth=6)
    return parts[0]


def _innermost(where: str, value: Any, pickler: type[Pickler], depth: int) -> tuple[str, Any]:
    for deeper, part in _parts(where, value) if depth else ():
        if not _pickles(part, pickler):
            return _innermost(deeper, part, pickler, depth - 1)
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
        for inner in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            yield f"a default of `{value.__name__}`", inner
    elif isinstance(value, dict):
        yield from ((f"{where}[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{where}[{number}]", inner) for number, inner in enumerate(value))
    elif (hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType))
          and type(value).__reduce__ is _BY_PARTS):
        yield from ((f"{where}.{key}", inner) for key, inner in vars(value).items())


def _global_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _pickles(value: Any, pickler: type[Pickler]) -> bool:
    try:
        pickler().pickled(value)
    except Exception:
        return False
    return True


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        return ""
    return text if len(text) <= 60 else text[:59] + "…"
