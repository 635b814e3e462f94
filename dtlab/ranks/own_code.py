"""Tell a learner's own modules from installed ones."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import cloudpickle

from dtlab.tracebacks import PACKAGE

_STANDARD_LIBRARY = tuple(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib"))


def own_module(function: Callable[..., object] | str) -> ModuleType | None:
    """The module `function` was written in, if it isn't an installed one or `__main__`."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__module__", None) or type(function).__module__
    known = cloudpickle.list_registry_pickle_by_value()
    module = sys.modules.get(name)
    return module if module is not None and is_own(module) and name not in known else None


def is_own(module: ModuleType) -> bool:
    """Has a learner written this module, in a file or a folder?"""
    place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if type(module) is not ModuleType or module.__name__ == "__main__" or place is None:
        return False
    return not _is_installed(place)


@functools.cache
def _is_installed(place: str) -> bool:
    """Does this file or folder come with Python, with dtlab, or with another package?"""
    return any(path.startswith((PACKAGE, *_STANDARD_LIBRARY)) or _holds_packages(Path(path).parent)
               for path in (place, os.path.realpath(place)))


@functools.cache
def _holds_packages(folder: Path) -> bool:
    """Are packages installed in `folder`, or in one around it? Their metadata lie beside them,
    wherever Python has been told to look for packages."""
    if folder.name in ("site-packages", "dist-packages") or any(folder.glob("*.dist-info")):
        return True
    return folder != folder.parent and _holds_packages(folder.parent)
