"""Ranks of one host that share nothing: as on systems without such memory, or under torchrun."""

from __future__ import annotations

from dtlab import Comm


def travelling(comm: Comm) -> Comm:
    """`comm`, as if its ranks shared nothing; and all that is split off it."""
    comm.shared = comm.letters = None  # type: ignore[attr-defined]
    subgroup = comm._subgroup
    comm._subgroup = lambda *how: travelling(subgroup(*how))  # type: ignore[method-assign]
    return comm
