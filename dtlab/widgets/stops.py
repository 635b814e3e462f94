"""Play, back, forward, and a slider: how a reader moves through the stops of a run."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets

from dtlab.widgets.explorer import button, choice


class Stops:
    """A slider over stops, each with a label of its own, such as "5.76 ms"; Play moves it, and so
    do two buttons, which are off at its ends. name: of the slider; stop: what one of them is
    called in tooltips; at: where the slider begins."""

    def __init__(self, name: str, stop: str, interval_ms: int, labels: Sequence[str], at: int):
        self.slider = choice(name, [(label, number) for number, label in enumerate(labels)], at,
                             width="420px")
        self.play = ipywidgets.Play(min=0, max=len(labels) - 1, interval=interval_ms,
                                    show_repeat=False)
        ipywidgets.jslink((self.play, "value"), (self.slider, "index"))
        self.back = button("◀ back", f"one {stop} back", lambda: self.step(-1))
        self.forward = button("forward ▶", f"one {stop} forward", lambda: self.step(1))
        self.controls = [self.play, self.back, self.forward, self.slider]
        self.slider.observe(lambda _: self._switch(), "value")
        self._switch()

    @property
    def at(self) -> int:
        """The stop that is shown, counted from 0."""
        number: int = self.slider.value
        return number

    def step(self, by: int) -> None:
        """Go on by this many stops, at most to the end."""
        self.slider.index = min(max(self.at + by, 0), len(self.slider.options) - 1)

    def _switch(self) -> None:
        self.back.disabled = self.at == 0
        self.forward.disabled = self.at == len(self.slider.options) - 1
