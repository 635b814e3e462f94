"""Play, back, forward, and a slider: how a reader moves through the stops of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ipywidgets

from dtlab.widgets.explorer import button, choice


class Stops:
    """A slider over stops, each with a label of its own, such as "5.76 ms"; Play moves it, and so
    do two buttons, which are off at its ends. name: of the slider; stop: what one of them is
    called in tooltips. moved: called after each move, not by `load`."""

    def __init__(self, name: str, stop: str, interval_ms: int, moved: Callable[[], None]):
        self._moved = moved
        self.slider = choice(name, [("", 0)], 0, width="420px")
        self.play = ipywidgets.Play(min=0, max=1, interval=interval_ms, show_repeat=False)
        ipywidgets.jslink((self.play, "value"), (self.slider, "index"))
        self.back = button("◀ back", f"one {stop} back", lambda: self.step(-1))
        self.forward = button("forward ▶", f"one {stop} forward", lambda: self.step(1))
        self.controls = [self.play, self.back, self.forward, self.slider]
        self.slider.observe(self._on_move, "index")

    @property
    def at(self) -> int:
        """The stop that is shown, counted from 0."""
        number: int = self.slider.index
        return number

    def load(self, labels: Sequence[str], at: int) -> None:
        """Take other stops, and go to one of them."""
        self.slider.unobserve(self._on_move, "index")
        self.slider.options = [(label, number) for number, label in enumerate(labels)]
        self.slider.index = at
        self.slider.observe(self._on_move, "index")
        self.play.max = max(1, len(labels) - 1)
        self.play.disabled = self.slider.disabled = len(labels) == 1
        self._switch()

    def step(self, by: int) -> None:
        """Go on by this many stops, at most to the end."""
        self.slider.index = min(max(self.at + by, 0), len(self.slider.options) - 1)

    def _on_move(self, _: object) -> None:
        self._switch()
        self._moved()

    def _switch(self) -> None:
        self.back.disabled = self.at == 0
        self.forward.disabled = self.at == len(self.slider.options) - 1
