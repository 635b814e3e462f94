"""Real processes, at the press of a button: each rank's number, state and return value."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ipywidgets

from dtlab.plots import Picture, rank_grid
from dtlab.processes.run import introduce
from dtlab.result import Result
from dtlab.widgets.explorer import Choice, Explorer
from dtlab.widgets.run_and_stop import RunAndStop

MOST_RANKS = 16
HEIGHT_IN = 3.4  # whatever the number of ranks, so that nothing below jumps


class RankGrid(Explorer):
    """A tile a rank. The slider sets how many; Run starts them for real and shows what came back;
    Stop ends them.

    fn: called as `fn(comm)` on every rank, as by `dtlab.run`. Errors (a rank that raised, a
    deadlock) are shown on the tiles. run: who launches; None: `dtlab.run`.
    """

    def __init__(self, fn: Callable[..., Any] = introduce, ranks: int = 4, *,
                 timeout: float = 30.0, run: Callable[..., Result] | None = None):
        self.fn, self.timeout, self._run = fn, timeout, run
        self.ranks = ipywidgets.IntSlider(value=ranks, min=1, max=max(MOST_RANKS, ranks),
                                          description="ranks")
        name = getattr(fn, "__name__", "function")
        self.buttons = RunAndStop(f"▶ Run {name}", "start the processes", self._begin, self._end,
                                  [self.ranks])
        self.buttons.run.button_style = "primary"
        super().__init__([self.ranks, *self.buttons.controls])

    def run(self) -> None:
        """Start the processes, wait for them, show what they returned or what went wrong."""
        self.buttons.here()

    def _begin(self) -> Callable[[], Result]:
        from dtlab.processes import run  # processes are launched by Run buttons only

        count = self.ranks.value
        self._picture(count, ["running"] * count)
        return partial(self._run or run, self.fn, ranks=count, timeout=self.timeout, echo=False)

    def _end(self, outcome: Result | BaseException) -> None:
        if isinstance(outcome, BaseException):
            try:
                self._picture(outcome)
            except Exception:  # an error that says nothing of ranks
                self._picture(self.ranks.value, ["stopped"] * self.ranks.value)
            self._say(str(outcome) or type(outcome).__name__, alarm=True)
            return
        self._picture(outcome)
        lines = [line for text in outcome.output for line in text.splitlines()]
        if lines:
            self._say(f"{self._alt} Printed: {' | '.join(lines[:40])}")

    def _update(self) -> None:
        self._picture(self.ranks.value)

    def _choice(self) -> Choice:
        return ()

    def _picture(self, what: Any, statuses: list[str] | None = None) -> None:
        self._shown, self._statuses = what, statuses
        picture = self._draw(HEIGHT_IN)
        self._alt = picture.alt
        self.image.value = picture.svg()
        self._say(picture.alt)

    def _draw(self, height_in: float | None = None) -> Picture:
        return rank_grid(self._shown, statuses=self._statuses, ranks=self.ranks.value,
                         height_in=height_in)
