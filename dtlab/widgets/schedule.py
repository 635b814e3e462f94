"""Which pipeline schedule, with what costs? And what if one cell of the grid changes?"""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets

from dtlab.errors import ConfigError
from dtlab.parallel.pipeline import (
    Schedule,
    dualpipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    naive,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from dtlab.plots import Picture
from dtlab.plots.schedule import schedule
from dtlab.widgets.explorer import Explorer, choice, dropdown

SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "naive": lambda p, m, v: naive(p, m),
    "GPipe": lambda p, m, v: gpipe(p, m),
    "1F1B": lambda p, m, v: one_f_one_b(p, m),
    "interleaved 1F1B": interleaved,
    "looped BFS": looped_bfs,
    "ZB-H1": lambda p, m, v: zb_h1(p, m),
    "ZB-H2": lambda p, m, v: zb_h2(p, m),
    "ZB-V": lambda p, m, v: zb_v(p, m),
    "DualPipe-V": lambda p, m, v: dualpipe_v(p, m),
}


class ScheduleExplorer(Explorer):
    """`plots.schedule` with controls, and the grid as text, to be edited: a schedule that can't run
    is refused, with the reason and the cell."""

    def __init__(self, name: str = "ZB-H1", ranks: int = 4, micro_batches: int = 8,
                 chunks: int = 2):
        self.name = dropdown("schedule", list(SCHEDULES), name, width="260px")
        self.ranks = choice("ranks", [(str(p), p) for p in range(1, 9)], ranks, width="200px")
        self.micro_batches = choice("micro-batches", [(str(m), m) for m in (
            1, 2, 3, 4, 6, 8, 12, 16)], micro_batches, width="260px")
        self.chunks = dropdown("chunks a rank, if interleaved", [1, 2, 3], chunks, "270px")
        self.forward = choice("F", [(f"{t:g}", t) for t in (0.5, 1.0, 1.5)], 1.0, width="180px")
        self.weights = choice("W, of B = 2", [(f"{t:g}", t) for t in (0.5, 0.75, 1.0, 1.25)], 1.0,
                              width="260px")
        self.latency = choice("a message", [(f"{t:g}", t) for t in (0.0, 0.1, 0.25, 0.5, 1.0)],
                              0.0, width="220px")
        self.grid = ipywidgets.Textarea(description="grid", layout=ipywidgets.Layout(
            width="990px", max_width="100%", height="150px"))
        self.grid.style.font_family = "monospace"
        super().__init__([self.name, self.ranks, self.micro_batches, self.chunks],
                         [self.forward, self.weights, self.latency], [self.grid])
        for control in (self.name, self.ranks, self.micro_batches, self.chunks):
            control.observe(lambda _: self._generate(), "value")
        for control in (self.grid, self.forward, self.weights, self.latency):
            control.observe(lambda _: self._update(), "value")
        self._generate()

    def static(self) -> Picture:
        """What is shown, as a matplotlib figure."""
        return self._draw()

    def _generate(self) -> None:
        text = str(SCHEDULES[self.name.value](self.ranks.value, self.micro_batches.value,
                                              self.chunks.value))
        if text == self.grid.value:
            self._update()
        self.grid.value = text

    def _draw(self) -> Picture:
        return schedule(Schedule.parse(self.grid.value), F=self.forward.value, B=2.0,
                        W=self.weights.value, comm=self.latency.value, title=self.name.value,
                        room=8)

    def _update(self) -> None:
        key = (self.grid.value, self.name.value, self.forward.value, self.weights.value,
               self.latency.value)
        try:
            self._show(key, self._draw)
        except ConfigError as error:
            reason, *grid = str(error).splitlines()
            marked = next((word for line in grid for word in line.split() if "»" in word), "")
            self._say(f"This schedule can't run: {reason}" + f", see {marked}" * bool(marked),
                      alarm=True)
