"""Waits with a limit: what it takes to tell a slow peer from a dead one. Algorithms don't need it.

Processes over Gloo and the simulator can wait so; not every communicator can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dtlab.comm import Comm, Work
from dtlab.errors import ConfigError


class Patient(Protocol):
    """A communicator that can limit how long it waits."""

    def wait_any(self, works: Sequence[Work], seconds: float) -> bool:
        """Wait until one of these receives has `arrived`, but no longer than `seconds`, virtual in
        the simulator. Returns whether one has; if not, wait for them again later."""


class Arriving(Protocol):
    """A receive that can be looked at."""

    def arrived(self) -> bool:
        """Has it come, so that `wait` returns at once? Or has its sender died: then `wait` raises
        `RankDied`. Known once it has been given to `wait_any`."""


def wait_any(comm: Comm, works: Sequence[Work], seconds: float) -> bool:
    """See `Patient.wait_any`. Raises `ConfigError` if `comm` can't."""
    patient: Any = comm
    if not hasattr(patient, "wait_any"):  # much sooner answered than `isinstance` of a Protocol
        raise ConfigError(f"{type(comm).__name__} can't limit how long it waits for a message; "
                          f"processes over Gloo and the simulator can")
    found: bool = patient.wait_any(works, seconds)
    return found


def arrived(work: Work) -> bool:
    """See `Arriving.arrived`."""
    look: Callable[[], bool] | None = getattr(work, "arrived", None)
    return look is not None and look()
