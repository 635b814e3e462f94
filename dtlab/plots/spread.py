"""Repeats of a measurement, drawn one way everywhere: nothing hidden, the middle stressed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes


def draw_spread(
    axes: Axes, places: Sequence[float], repeats: Sequence[Sequence[float]], *, color: str,
    marker: str, fill: str, label: str = "", across: bool = False,
) -> None:
    """Median as a dot; a thick bar holds the middle half of the repeats, a thin one all of them.

    places: where along the other axis. across: whether the repeats lie along x rather than y.
    """
    if not len(places):
        return
    shares = (0, 25, 50, 75, 100)
    least, lower, middle, upper, most = np.array([np.percentile(r, shares) for r in repeats]).T
    lines = axes.hlines if across else axes.vlines
    lines(places, least, most, color=color, linewidth=1.6, zorder=4)
    lines(places, lower, upper, color=color, linewidth=7, alpha=0.45, zorder=4)
    x, y = (middle, places) if across else (places, middle)
    axes.plot(x, y, linestyle="", marker=marker, markersize=10, color=color,
              markerfacecolor=fill, markeredgewidth=2.5, zorder=5, label=label or "_")
