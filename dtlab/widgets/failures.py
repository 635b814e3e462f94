"""Vary how often nodes fail, what a save and a restart take, and the answer: what is left?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from dtlab.checks import check_amount, check_each, check_positive
from dtlab.cost.failures import DAY_S
from dtlab.plots import Picture
from dtlab.plots.failures import failures
from dtlab.reliability import Goodput, goodput
from dtlab.widgets.explorer import Choice, Explorer, dropdown, number_slider, values_beside

NODES, REPAIR_S, MINUTE_S = 8, 3600.0, 60.0
COPIES = {"copy_s": MINUTE_S, "copy_restart_s": MINUTE_S}
ANSWERS = {"restart, with a spare": {"spares": NODES},
           "the same, and copies in memory": {"spares": NODES, **COPIES},
           "restart, no spare": {},
           "shrink, and copies in memory": {"answer": "shrink", **COPIES},
           "replicas of 2 nodes": {"answer": "replicas", "copy_s": MINUTE_S, "group": 2}}


@lru_cache(maxsize=128)
def _month(mttf_s: float, save_s: float, restart_s: float, interval_s: float, answer: str
           ) -> Goodput:
    return goodput(NODES, DAY_S / mttf_s / NODES, save_s, restart_s, interval_s,
                   repair_s=REPAIR_S, **ANSWERS[answer])  # type: ignore[arg-type]


class FailureExplorer(Explorer):
    """`plots.failures` with sliders: a simulated month of 8 nodes, its first day row by row. A
    failed node is away for an hour. Copies go to the neighbour's memory each minute, and load from
    there in a minute; replicas take steps of a minute.

    mttf_s: seconds from failure to failure; interval_s: of work between saves; answer: one of
    `ANSWERS`. Raises `ConfigError` for others, and times that make no sense.
    """

    def __init__(self, mttf_s: float = 4 * 3600, save_s: float = 120, restart_s: float = 600,
                 interval_s: float = 1800, answer: str = "restart, with a spare"):
        check_each(check_positive, mttf_s=mttf_s, save_s=save_s, interval_s=interval_s)
        check_amount("restart_s", restart_s)
        self.mttf = _times("a failure every", 3600, (1, 2, 4, 8, 12, 24), "h", mttf_s)
        self.save = _times("save", 60, (0.5, 1, 2, 5, 10, 20), "min", save_s)
        self.restart = _times("restart", 60, (1, 2, 5, 10, 20, 40), "min", restart_s)
        self.interval = _times("work between saves", 60, (
            5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 480), "min", interval_s)
        self.answer = dropdown("answer", ANSWERS, answer, width="300px")
        super().__init__([self.mttf, self.save], [self.restart, self.interval], [self.answer])

    def _near(self) -> Iterator[Choice]:
        *times, _, answer = self._choice()
        return ((*times, interval_s, answer) for interval_s in values_beside(self.interval))

    def _draw(self, *chosen: Any) -> Picture:
        return failures(_month(*chosen), DAY_S, curve=True)


def _times(name: str, unit_s: float, counts: tuple[float, ...], unit: str, own_s: float) -> Any:
    """A slider over times, among them the one that was given."""
    return number_slider(name, [count * unit_s for count in counts], own_s,
                         lambda seconds: f"{seconds / unit_s:g} {unit}")
