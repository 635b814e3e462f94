"""Vary α, β, γ and the number of ranks, and see which algorithm wins where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dtlab.checks import check_choice
from dtlab.collectives import ALGORITHMS
from dtlab.cost import form
from dtlab.plots import Picture, cost_curves
from dtlab.plots.curves import Measured
from dtlab.units import bytes_text, seconds_text
from dtlab.widgets.explorer import Explorer, choice, dropdown, number_slider

TIMES = (1e-6, 1e2)  # of the axis: fixed, so that curves move and the axis does not


class AlphaBetaExplorer(Explorer):
    """`plots.cost_curves` with sliders. `measured` is shown for its own collective and ranks;
    `algorithms` are those of its own collective to show, if not all.

    alpha, beta, gamma: where the sliders begin, in seconds, seconds per byte sent, per byte
    reduced; a value that you have fitted yourself is one of the slider's stops.
    """

    def __init__(self, collective: str = "all_reduce", ranks: int = 8, alpha: float = 5e-6,
                 beta: float = 1e-10, gamma: float = 0.0, measured: Measured | None = None,
                 algorithms: Sequence[str] | None = None):
        check_choice("collective", collective, ALGORITHMS)
        for name in algorithms or ():
            form(collective, name, 1, 0)  # raises if there is none
        self.measured, self._measured_at = measured, (collective, ranks)
        self._algorithms = {collective: list(algorithms)} if algorithms else {}
        counts = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1024)
        self.collective = dropdown("collective", ALGORITHMS, collective)
        self.ranks = number_slider("ranks p", counts, ranks, "{:,}".format)
        self.alpha = choice("latency α", _stops(alpha, -7, -3, seconds_text), alpha)
        self.beta = choice("bandwidth 1/β", _stops(beta, -12, -6, _speed)[::-1], beta)
        self.gamma = choice("reduction 1/γ", _stops(gamma, -12, -8, _speed)[::-1], gamma)
        super().__init__([self.collective, self.ranks], [self.alpha, self.beta], [self.gamma])

    def _draw(self, collective: str, ranks: int, alpha: float, beta: float, gamma: float
              ) -> Picture:
        names = self._algorithms.get(collective)
        measured = self.measured if (collective, ranks) == self._measured_at else None
        return cost_curves(collective, names, ranks, alpha, beta, gamma, measured, times=TIMES)


def _stops(own: float, low: int, high: int, text: Callable[[float], str]
           ) -> list[tuple[str, float]]:
    """1, 2, 5, 10 … from 10^low to 10^high, 0 before them, and the value that was given."""
    round_ones: Iterable[float] = (float(f"{digit}e{power}") for power in range(low, high)
                                   for digit in (1, 2, 5))
    values = sorted({0.0, *round_ones, 10.0**high, own})
    return [(text(value), value) for value in values]


def _speed(seconds_per_byte: float) -> str:
    return f"{bytes_text(1 / seconds_per_byte)}/s" if seconds_per_byte else "∞"
