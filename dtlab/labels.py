"""What messages are for: a label that whoever holds it puts back when it is done."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Protocol


class Labelled(Protocol):
    """A communicator: its messages carry this label."""

    label: str


class Label(AbstractContextManager[None]):
    """`comm.label` inside. (One of these for each call of a collective: so it does little.)"""

    def __init__(self, comm: Labelled, label: str):
        self._comm, self._label = comm, sys.intern(label)  # equal ones compare faster

    def __enter__(self) -> None:
        self._label, self._comm.label = self._comm.label, self._label

    def __exit__(self, *error: object) -> None:
        self._comm.label = self._label
