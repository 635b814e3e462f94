"""A run's timeline, to be zoomed into."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import ipywidgets

from dtlab.plots import Picture, timeline
from dtlab.plots.bars import end_of
from dtlab.trace import Trace
from dtlab.widgets.explorer import Explorer, button


class TimelineExplorer(Explorer):
    """`plots.timeline` with a slider for the stretch of time to show, in percent of the run.

    ranks: those to show (None: all).
    """

    def __init__(self, trace: Trace, title: str = "Timeline",
                 ranks: Sequence[int] | None = None):
        self.trace, self.title, self.ranks = trace, title, ranks
        self._end_s = end_of(trace) or 1.0
        self.window = ipywidgets.IntRangeSlider(
            value=(0, 100), min=0, max=100, description="show (% of the run)",
            layout=ipywidgets.Layout(width="460px"), style={"description_width": "initial"},
        )
        self.arrows = ipywidgets.Checkbox(value=True, description="arrows", indent=False,
                                          layout=ipywidgets.Layout(width="90px"))
        super().__init__([self.window, self.arrows], [
            button("zoom in", "show half as much", lambda: self._zoom(0.5)),
            button("zoom out", "show twice as much", lambda: self._zoom(2.0)),
            button("◀ earlier", "move to the left", lambda: self._shift(-0.5)),
            button("later ▶", "move to the right", lambda: self._shift(0.5)),
        ])
        self._update()
        self.window.observe(lambda _: self._update(), "value")
        self.arrows.observe(lambda _: self._update(), "value")

    def static(self) -> Picture:
        """The stretch that is shown, as a matplotlib figure."""
        return self._draw(*self._choice())

    def _choice(self) -> tuple[int, int, bool]:
        low, high = self.window.value
        return min(low, 99), max(high, min(low, 99) + 1), self.arrows.value

    def _zoom(self, factor: float) -> None:
        low, high = self.window.value
        half = max(1.0, (high - low) * factor / 2)
        middle = min(max((low + high) / 2, half), 100 - half) if half < 50 else 50.0
        self.window.value = max(0, round(middle - half)), min(100, round(middle + half))

    def _shift(self, share: float) -> None:
        low, high = self.window.value
        by = round((high - low) * share) or (1 if share > 0 else -1)
        by = max(-low, min(100 - high, by))
        self.window.value = low + by, high + by

    def _update(self) -> None:
        choice = self._choice()
        self._show(choice, partial(self._draw, *choice))

    def _draw(self, low: int, high: int, arrows: bool) -> Picture:
        end = self._end_s * 1.01
        return timeline(self.trace, self.title, window=(end * low / 100, end * high / 100),
                        ranks=self.ranks, arrows=arrows)
