"""One published figure, beside what our own formulas and models give."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

MATCH, DISAGREE, OPEN = "must match", "must disagree", "open"


class Published(NamedTuple):
    """One figure. `tolerance` is in the unit of the figure, for what the source has rounded."""

    source: str
    what: str
    printed: float
    unit: str
    compute: Callable[[], float]
    tolerance: float
    verdict: str = MATCH

    @property
    def agrees(self) -> bool:
        """Is what we compute the printed figure, within the tolerance?"""
        return abs(self.compute() - self.printed) <= self.tolerance

    @property
    def holds(self) -> bool:
        """Do the two compare as the verdict says? Of what is open, nothing is said."""
        return self.verdict == OPEN or self.agrees == (self.verdict == MATCH)

    def computed(self) -> Published:
        """Return this row, with its figure computed once and for all."""
        ours = self.compute()
        return self._replace(compute=lambda: ours)
