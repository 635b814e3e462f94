"""What messages are for: a label that whoever holds it puts back when it is done."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Protocol


class Labelled(Protocol):
    """A communicator: its messages carry this label."""

    label: str


class Label(AbstractContextManager[None]):
    """`comm.label` inside. (One of these for each call of a collective: so it does little.)

    What happens within a collective's call, "all_reduce(…)", goes by both names, the call's first:
    an algorithm may be made of other collectives.
    """

    def __init__(self, comm: Labelled, label: str):
        self._comm, self._label = comm, sys.intern(label)  # equal ones compare faster

    def __enter__(self) -> None:
        outer = self._comm.label
        if outer.endswith(")"):
            self._label = sys.intern(f"{outer} > {self._label}")
        self._label, self._comm.label = outer, self._label

    def __exit__(self, *error: object) -> None:
        self._comm.label = self._label
