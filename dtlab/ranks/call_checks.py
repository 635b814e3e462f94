"""Checks of a call: can the function be called as a rank's is, and are the options known?"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from dtlab.checks import short
from dtlab.errors import ConfigError


def check_call(fn: Callable[..., Any], args: tuple[Any, ...], caller: str) -> None:
    """Raise `ConfigError` unless `fn(comm, *args)` fits what `fn` takes.

    caller: "run" or "simulate", for the message.
    """
    if not callable(fn):
        raise ConfigError(f"{caller} needs a function of a communicator, not {fn!r}")
    plain = fn.func if isinstance(fn, functools.partial) else fn
    if inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain):
        raise ConfigError(f"{caller} needs an ordinary function, not `async def {plain.__name__}`; "
                          f"write `def`: ranks run side by side anyway")
    if inspect.isgeneratorfunction(plain):
        raise ConfigError(f"{caller} needs an ordinary function, and {plain.__name__} has a "
                          f"`yield`: calling it runs nothing; return a list")
    try:
        signature = inspect.signature(fn)
    except (ValueError, TypeError):  # some functions written in C don't tell
        return
    try:
        signature.bind(None, *args)
    except TypeError as misfit:
        name = getattr(fn, "__name__", repr(fn))
        call = ", ".join(["comm", *map(short, args)])
        more = {"run": "; the number of ranks goes by name: ranks=4",
                "simulate": "; the network goes by name: network=…"}[caller] if args else ""
        raise ConfigError(
            f"{caller} calls {name}({call}), but {name} is defined as {name}{signature}: "
            f"{misfit}{more}"
        ) from None


def check_options(caller: Callable[..., Any], unknown: dict[str, Any]) -> None:
    """Raise `ConfigError` for the first option of `unknown`, which `caller` doesn't have."""
    for name in unknown:
        options = [p.name for p in inspect.signature(caller).parameters.values()
                   if p.kind is p.KEYWORD_ONLY]
        advice = _INSTEAD.get((caller.__name__, name), f"it has: {', '.join(options)}")
        raise ConfigError(f"{caller.__name__} has no option {name!r}; {advice}")


_INSTEAD = {
    ("simulate", "ranks"): "the network says how many ranks there are, such as "
                           "network=dtlab.topology.uniform(4, 5e-6, 10e9)",
    ("run", "network"): "processes take their number by name, ranks=4; a network is simulated: "
                        "simulate(fn, network=…)",
}
