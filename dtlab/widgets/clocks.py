"""A widget of workers and their waits: choose a rule and paces, and move through time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from dtlab import ps
from dtlab.errors import ConfigError
from dtlab.plots import Picture, clocks
from dtlab.recording import PACES, ClockRun, watch_clocks
from dtlab.widgets.explorer import Explorer, dropdown
from dtlab.widgets.stops import Stops

STOPS = 40  # of the time slider: the run is cut into this many equal parts
RULES: dict[str, ps.Consistency] = {
    "BSP": ps.BSP(),
    "SSP, s = 1": ps.SSP(1),
    "SSP, s = 3": ps.SSP(3),
    "ASP": ps.ASP(),
    "1 backup worker": ps.BackupWorkers(1),
    "2 backup workers": ps.BackupWorkers(2),
    "quorum of 90 %": ps.Quorum(0.9),
}


class ClockExplorer(Explorer):
    """`plots.clocks` with a slider for the time: play it, step through it, scrub.

    rule, pace: what is chosen at first, by the names of `rules` and `recording.PACES`. rules: what
    to choose from, such as a `Consistency` of your own. Each choice is simulated once, in some
    hundredths of a second, and kept. Raises `ConfigError` for unknown names.
    """

    def __init__(self, rule: str = "BSP", pace: str = "uneven", workers: int = 5,
                 end_s: float = 2.0, rules: Mapping[str, ps.Consistency] = RULES):
        for name, known in ((rule, rules), (pace, PACES)):
            if name not in known:
                raise ConfigError(f"unknown {name!r}; there are: {', '.join(known)}")
        self.rules, self.workers, self.end_s = dict(rules), workers, end_s
        self._runs: dict[tuple[str, str], ClockRun] = {}
        self.rule = dropdown("rule", list(rules), rule)
        self.pace = dropdown("workers", list(PACES), pace)
        self.player = Stops("time", "moment", 400, self._update)
        self.player.load([f"{end_s * stop / STOPS:.2f} s" for stop in range(STOPS + 1)], STOPS // 2)
        super().__init__([self.rule, self.pace], self.player.controls)
        for control in (self.rule, self.pace):
            control.observe(lambda _: self._update(), "value")
        self._update()

    @property
    def run(self) -> ClockRun:
        """The run that is shown."""
        chosen = self.rule.value, self.pace.value
        if chosen not in self._runs:
            self._runs[chosen] = watch_clocks(self.rules[chosen[0]], PACES[chosen[1]],
                                              self.workers, self.end_s, name=chosen[0])
        return self._runs[chosen]

    def static(self) -> Picture:
        """The whole run that is shown, as a matplotlib figure."""
        return clocks(self.run)

    def _update(self) -> None:
        run, stop = self.run, self.player.at
        self._show(self._key(stop), partial(self._draw, run, stop))
        for near in (stop + 1, stop - 1):
            if 0 <= near <= STOPS:
                self._ahead(self._key(near), partial(self._draw, run, near))

    def _key(self, stop: int) -> tuple[Any, ...]:
        return self.rule.value, self.pace.value, stop

    @staticmethod
    def _draw(run: ClockRun, stop: int) -> Picture:
        return clocks(run, run.end_s * stop / STOPS)
