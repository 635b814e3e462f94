"""Vary devices and samples a device: is the batch that they make worth its samples?"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from dtlab.plots import Picture
from dtlab.plots.critical_batch import critical_batch
from dtlab.widgets.explorer import Explorer, choice


class CriticalBatchExplorer(Explorer):
    """`plots.critical_batch` with sliders: how many devices, how many samples each takes a step,
    the critical batch. counted: batch → steps of runs, shown as dots.
    """

    def __init__(self, least_steps: float = 30, critical: int = 16,
                 counted: Mapping[int, float] | None = None, devices: int = 4, samples: int = 4):
        self.least_steps, self.counted, self._counted_at = least_steps, counted, critical
        self.devices = choice("devices", _powers(0, 12, devices), devices)
        self.samples = choice("samples a device", _powers(0, 8, samples), samples)
        self.critical = choice("critical batch", _powers(2, 16, critical), critical)
        super().__init__([self.devices, self.samples], [self.critical])
        self._update()
        for control in self.controls:
            control.observe(lambda _: self._update(), "value")

    def static(self) -> Picture:
        """Return the picture that is shown, as a matplotlib figure."""
        return self._draw(*self._choice())

    def _choice(self) -> tuple[int, int]:
        return self.critical.value, self.devices.value * self.samples.value

    def _update(self) -> None:
        now = self._choice()
        self._show(now, partial(self._draw, *now))

    def _draw(self, critical: int, batch: int) -> Picture:
        counted = self.counted if critical == self._counted_at else None
        return critical_batch(self.least_steps, critical, batch, counted)


def _powers(low: int, high: int, own: int) -> list[tuple[str, int]]:
    """The powers of two from 2^low to 2^high, and the value that was given."""
    return [(f"{n:,}", n) for n in sorted({*(1 << k for k in range(low, high + 1)), own})]
