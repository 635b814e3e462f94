"""Parts of this package that a sandboxed process does not have: an answer that needs none of the
collectives, schedules or planners finds none. Their names can be imported, as a notebook's cells
do; what is behind them raises `NotYourOwn` once it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from dtlab.errors import DtlabError

# What a rank itself is made of.
PRESENT = ("__init__", "checks", "comm", "errors", "grading", "machine", "processes", "ranks",
           "reduction", "result", "trace", "tracebacks", "units", "wires")


class NotYourOwn(DtlabError):
    """The answer calls a function of this package, which may do just what the exercise asks for."""


class Absent:
    """Stands for what a module that is absent would hold. Where the module is present, it becomes
    what it stands for when it is unpickled."""

    def __init__(self, module: str, name: str):
        self._module, self._name = module, name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(self._module, f"{self._name}.{name}")

    def __call__(self, *_args: Any, **_options: Any) -> Any:
        raise NotYourOwn(f"the answer calls {self._module}.{self._name}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _found, (self._module, self._name)


def _found(module: str, name: str) -> Any:
    value: Any = import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


class _AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(self.__name__, name)


class _Finder(MetaPathFinder, Loader):
    """Finds an empty module for each of this package that is not `present`, or taken out of it."""

    def __init__(self, present: Sequence[str], taken_out: Sequence[str]):
        self._present, self._taken_out = present, taken_out

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None
                  ) -> ModuleSpec | None:
        parts = name.split(".")
        if parts[0] != "dtlab" or len(parts) == 1 or (
                parts[1] in self._present and name not in self._taken_out):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def taken_out(library: Sequence[str]) -> list[str]:
    """Return the modules that a library ("collectives", "-collectives.trees") excludes."""
    return [part[1:] for part in library if part.startswith("-")]


def take_out(library: Sequence[str]) -> None:
    """Leave only names of what is taken out, in a process that has all of this package, too."""
    for module in [import_module(f"dtlab.{name}") for name in taken_out(library)]:
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value.__module__ == module.__name__ and (
                    not name.startswith("_")):
                setattr(module, name, Absent(module.__name__, name))


def keep_only(library: Sequence[str]) -> None:
    """Let this process find of this package, from here on, only what a rank is made of, and these
    parts ("collectives", …), without those that are taken out ("-collectives.trees")."""
    sys.meta_path.insert(0, _Finder((*PRESENT, *library),
                                    [f"dtlab.{name}" for name in taken_out(library)]))
