"""Vary devices and samples a device: is the batch that they make worth its samples?"""

from __future__ import annotations

from collections.abc import Mapping

from dtlab.plots import Picture
from dtlab.plots.critical_batch import critical_batch
from dtlab.widgets.explorer import Explorer, number_slider

POWERS = [1 << k for k in range(17)]


class CriticalBatchExplorer(Explorer):
    """`plots.critical_batch` with sliders: how many devices, how many samples each takes a step,
    the critical batch. counted: batch → steps of runs, shown as dots.
    """

    def __init__(self, least_steps: float = 30, critical: int = 16,
                 counted: Mapping[int, float] | None = None, devices: int = 4, samples: int = 4):
        self.least_steps, self.counted, self._counted_at = least_steps, counted, critical
        self.devices = number_slider("devices", POWERS[:13], devices, "{:,}".format)
        self.samples = number_slider("samples a device", POWERS[:9], samples, "{:,}".format)
        self.critical = number_slider("critical batch", POWERS[2:], critical, "{:,}".format)
        super().__init__([self.devices, self.samples], [self.critical])

    def _draw(self, devices: int, samples: int, critical: int) -> Picture:
        counted = self.counted if critical == self._counted_at else None
        return critical_batch(self.least_steps, critical, devices * samples, counted)
