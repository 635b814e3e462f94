"""A widget of placements of servers: choose one, with your own numbers; see which link fills."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dtlab.errors import ConfigError
from dtlab.plots import Picture
from dtlab.plots.placement import MOST_GPUS, placement
from dtlab.ps.gpu_placement import GPU_PLACEMENTS
from dtlab.recording import placements
from dtlab.units import bytes_text
from dtlab.widgets.explorer import Choice, Explorer, choice, dropdown, number_slider

_SIZES = [d * 10**k for k in (6, 7, 8, 9, 10) for d in (1, 2, 5)]
_SPEEDS = (1e9, 2e9, 4e9, 8e9, 12e9, 16e9, 25e9, 32e9, 50e9, 64e9, 100e9, 300e9)


class PlacementExplorer(Explorer):
    """`plots.placement` with controls. Every number of yours becomes a stop of its slider.

    nbytes: of gradients, on each GPU. bandwidth_Bps: of each PCIe link, bytes per second, one
    direction. Raises `ConfigError` for numbers that make no sense.
    """

    def __init__(self, where: str = GPU_PLACEMENTS[0], gpus: int = 4, nbytes: int = 160_000_000,
                 bandwidth_Bps: float = 16e9, switches: int = 1):
        if nbytes < 4 or bandwidth_Bps <= 0:
            raise ConfigError("nbytes must be 4 or more, bandwidth_Bps above 0")
        placement(placements(gpus, nbytes, bandwidth_Bps, switches), where)  # may raise
        self.where = dropdown("servers", GPU_PLACEMENTS, where, width="260px")
        self.gpus = number_slider("GPUs", range(2, MOST_GPUS + 1, 2), gpus, str, width="220px")
        self.switches = choice("PCIe switches", [("1", 1), ("2", 2)], switches, width="240px")
        self.nbytes = number_slider("gradients", [*_SIZES, 160_000_000], nbytes, bytes_text)
        self.speed = number_slider("a link's bandwidth", _SPEEDS, bandwidth_Bps,
                                   lambda speed_Bps: f"{bytes_text(speed_Bps)}/s")
        super().__init__([self.where, self.gpus, self.switches], [self.nbytes, self.speed])

    def _choice(self) -> Choice:
        gpus, switches = self.gpus.value, self.switches.value
        return (self.where.value, gpus, self.nbytes.value, self.speed.value,
                1 if gpus % switches else switches)

    def _near(self) -> Iterator[Choice]:
        _, *machine = self._choice()
        return ((where, *machine) for where in GPU_PLACEMENTS)

    def _draw(self, where: str, *machine: Any) -> Picture:
        return placement(placements(*machine), where)
