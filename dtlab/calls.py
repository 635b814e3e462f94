"""Can this function be called as a rank's function is? Asked before any rank starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from dtlab.errors import ConfigError


def check_call(fn: Callable[..., Any], args: tuple[Any, ...], caller: str) -> None:
    """Raise `ConfigError` unless `fn(comm, *args)` fits what `fn` takes.

    caller: "run" or "simulate", for the message.
    """
    if not callable(fn):
        raise ConfigError(f"{caller} needs a function of a communicator, not {fn!r}")
    try:
        signature = inspect.signature(fn)
    except (ValueError, TypeError):  # some functions written in C don't tell
        return
    try:
        signature.bind(None, *args)
    except TypeError as misfit:
        name = getattr(fn, "__name__", repr(fn))
        call = ", ".join(["comm", *map(_short, args)])
        more = {"run": "; the number of ranks goes by name: ranks=4",
                "simulate": "; the network goes by name: network=…"}[caller] if args else ""
        raise ConfigError(
            f"{caller} calls {name}({call}), but {name} is defined as {name}{signature}: "
            f"{misfit}{more}"
        ) from None


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 30 else text[:27] + "…"
