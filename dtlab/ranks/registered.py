"""Algorithms and closed forms that a learner has registered in a notebook or a script.

Ranks are forked from a server that knows only the package's own; so these go with each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dtlab.collectives.registry import IMPLEMENTATIONS, algorithm
from dtlab.cost.model import FORMS, costs

Named = tuple[tuple[str, str], Callable[..., Any]]  # (collective, algorithm), function


class Registered(NamedTuple):
    """Algorithms and closed forms that are not the package's own."""

    algorithms: list[Named]
    forms: list[Named]

    def register(self) -> None:
        """Register them here, too."""
        for names, function in self.algorithms:
            algorithm(*names)(function)
        for names, function in self.forms:
            costs(*names)(function)

    def parts(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yield each of them, after its description in words."""
        for what, things in zip(("algorithm", "closed form"), self, strict=True):
            for (collective, name), function in things:
                yield f"the {what} {name!r} of {collective}", function


def registered() -> Registered:
    """Return what has been registered here, besides what every rank knows."""
    algorithms = [((collective, name), function) for collective, named in IMPLEMENTATIONS.items()
                  for name, function in named.items()]
    return Registered(list(filter(_is_own, algorithms)), list(filter(_is_own, FORMS.items())))


def _is_own(thing: Named) -> bool:
    return not (getattr(thing[1], "__module__", None) or "").startswith("dtlab.")
