"""A simulated rank gets what a process gets: its own copy of the function and of its arguments.

The call is pickled once, and unpickled for each rank. So ranks that share one Python process don't
add into each other's tensors, nor append to each other's lists.
"""

from __future__ import annotations

import io
import marshal
import os
import pickle
import random
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from cloudpickle.cloudpickle import _dynamic_class_reduce

from dtlab.errors import ConfigError
from dtlab.parallel import random_numbers
from dtlab.ranks.own_code import is_own, own_module
from dtlab.ranks.pickling import Pickler
from dtlab.ranks.registered import Registered
from dtlab.ranks.serialization import refusing_by_name
from dtlab.simulator.rank_classes import CLASSES, Classes, dumps, loads, of_rank

RANDOM = -1  # in a pickle: the module `random`


class Copies:
    """Makes, for one rank after the other, its own `fn` and `args`.

    Raises `ConfigError` for what can't be pickled, or if the memory of this machine can't hold the
    copies of all ranks.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], ranks: int):
        pickler = _CallPickler()
        with refusing_by_name(fn, args, Registered([], []), _CallPickler):
            self._pickled = pickler.pickled((fn, args))
        self._codes, self._classes = pickler.codes, pickler.classes
        marshalled = marshal.dumps(self._codes)
        self._to_compile = marshalled if b"compile" in marshalled else None
        self._check_memory(ranks)

    def take(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the rank's own `fn` and `args`; called on that rank."""
        CLASSES.set({})
        buffers = [_copy(buffer) for buffer in self._pickled.buffers]
        codes = marshal.loads(self._to_compile) if self._to_compile else self._codes
        generator = random.Random(torch.initial_seed())
        random_numbers.PYTHON.set(generator)
        fn, args = _CallUnpickler(self._pickled.data, buffers, codes, generator).load()
        return fn, args

    def returned(self, value: Any) -> Any:
        """Return `value`, which a rank has returned or raised, with the caller's classes in place
        of the rank's; called outside of ranks. What can't be pickled stays as it is."""
        if not self._classes:
            return value
        try:
            return loads(dumps(value), self._classes)
        except Exception:
            return value

    def _check_memory(self, ranks: int) -> None:
        each = len(self._pickled.data) + sum(buffer.nbytes for buffer in self._pickled.buffers)
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if each * ranks > there:
            raise ConfigError(
                f"{ranks} ranks need a copy each of {each:,} bytes, more than the {there:,} bytes "
                f"of this machine; make smaller tensors on each rank, or tensors without data "
                f'(device="meta") when only time matters'
            )


class Shared:
    """The alternative to `Copies`: all ranks have `fn` itself."""

    def __init__(self, fn: Callable[..., Any]):
        self._fn = fn

    def take(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._fn, ()

    def returned(self, value: Any) -> Any:
        return value


def _copy(buffer: memoryview) -> Any:
    copy = torch.empty(buffer.nbytes, dtype=torch.uint8, device="cpu").numpy()
    copy[:] = buffer
    return copy


class _CallPickler(Pickler):
    """Takes a learner's own modules by value; ranks share the code of functions, unless one of them
    calls `torch.compile`, which keeps what it has compiled with the code.

    A module is pickled without contents, so that functions can have its variables as globals;
    where it is referred to as a module, its contents follow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.codes: list[CodeType] = []
        self.classes: Classes = {}  # that go by value
        self._modules: dict[str, tuple[_EmptyModule, _Variables]] = {}

    def persistent_id(self, x: Any) -> int | None:
        """Asked for each object first: a number for what is not pickled: code, which is shared, and
        the module `random`, of which each rank has its own."""
        if x is random:
            return RANDOM
        if type(x) is not CodeType:
            return None
        self.codes.append(x)
        return len(self.codes) - 1

    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, ModuleType) and is_own(x):
            contents = {name: value for name, value in vars(x).items() if name[:2] != "__"}
            return _same, (self._empty(x)[0],), contents, None, None, _fill_module
        if isinstance(x, FunctionType) and own_module(x):
            return self._dynamic_function_reduce(x)
        own_class = isinstance(x, type) and own_module(x)
        reduced = _dynamic_class_reduce(x) if own_class else super().reducer_override(x)
        return of_rank(x, reduced, self.classes)

    def _function_getnewargs(self, function: FunctionType) -> tuple[Any, ...]:
        code, variables, *others = super()._function_getnewargs(function)
        module = own_module(function)
        if module is not None and function.__globals__ is vars(module):
            variables = self._empty(module)[1]
        return code, variables, *others

    def _empty(self, module: ModuleType) -> tuple[_EmptyModule, _Variables]:
        if module.__name__ not in self._modules:
            empty = _EmptyModule(module)
            self._modules[module.__name__] = empty, _Variables(empty)
        return self._modules[module.__name__]


class _CallUnpickler(pickle.Unpickler):
    """Reads what `_CallPickler` has written. codes: what it shares. generator: of the rank's module
    `random`."""

    def __init__(self, data: bytes, buffers: list[Any], codes: list[CodeType],
                 generator: random.Random):
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._codes, self._generator = codes, generator
        self._random: ModuleType | None = None

    def persistent_load(self, number: int) -> CodeType | ModuleType:
        if number != RANDOM:
            return self._codes[number]
        self._random = self._random or _own_random(self._generator)
        return self._random


# ---- modules ------------------------------------------------------------------------------------


def _own_random(generator: random.Random) -> ModuleType:
    """The module `random`, whose functions draw from `generator`."""
    own = ModuleType("random")
    vars(own).update(vars(random), _inst=generator)
    for name, x in vars(random).items():
        if getattr(x, "__self__", None) is vars(random)["_inst"]:
            setattr(own, name, getattr(generator, name))
    return own


class _EmptyModule:
    """Arrives as a new module, without contents."""

    def __init__(self, module: ModuleType):
        self._about = {"__name__": module.__name__, "__package__": module.__package__}

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleType, (self._about["__name__"],), self._about, None, None, _fill_module


class _Variables:
    """Arrives as the dict of the variables of such a module."""

    def __init__(self, module: _EmptyModule):
        self._module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return vars, (self._module,)


def _same(module: ModuleType) -> ModuleType:
    return module


def _fill_module(module: ModuleType, contents: dict[str, Any]) -> None:
    vars(module).update(contents)
