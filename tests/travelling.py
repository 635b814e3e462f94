"""Ranks of one host that share no memory: as on systems without it, or under torchrun."""

from __future__ import annotations

from dtlab import Comm


def travelling(comm: Comm) -> Comm:
    """`comm`, as if its ranks shared no memory; and all that is split off it."""
    comm.shared, subgroup = None, comm._subgroup  # type: ignore[attr-defined]
    comm._subgroup = lambda *how: travelling(subgroup(*how))  # type: ignore[method-assign]
    return comm
