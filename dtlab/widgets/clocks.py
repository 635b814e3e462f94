"""A widget of workers and their waits: choose a rule and paces, and move through time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dtlab import ps
from dtlab.plots import Picture, clocks
from dtlab.recording import PACES, ClockRun, watch_clocks
from dtlab.widgets.explorer import Choice, Explorer, dropdown
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
        self.rules, self.workers, self.end_s = dict(rules), workers, end_s
        self._runs: dict[tuple[str, str], ClockRun] = {}
        self.rule = dropdown("rule", rules, rule)
        self.pace = dropdown("workers", PACES, pace)
        self.player = Stops("time", "moment", 400, [
            f"{end_s * stop / STOPS:.2f} s" for stop in range(STOPS + 1)], STOPS // 2)
        super().__init__([self.rule, self.pace], self.player.controls)

    @property
    def run(self) -> ClockRun:
        """The run that is shown."""
        chosen = rule, pace = self.rule.value, self.pace.value
        if chosen not in self._runs:
            self._runs[chosen] = watch_clocks(self.rules[rule], PACES[pace], self.workers,
                                              self.end_s, name=rule)
        return self._runs[chosen]

    def static(self) -> Picture:
        """The whole run that is shown, as a matplotlib figure."""
        return clocks(self.run)

    def _choice(self) -> Choice:
        return self.rule.value, self.pace.value, self.player.at

    def _near(self) -> Iterator[Choice]:
        *chosen, stop = self._choice()
        return ((*chosen, near) for near in (stop + 1, stop - 1) if 0 <= near <= STOPS)

    def _draw(self, rule: str, pace: str, stop: int) -> Picture:
        return clocks(self.run, self.end_s * stop / STOPS)
