"""The line chart: series of points over two axes, each linear or logarithmic, with units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from dtlab.collectives import ALGORITHMS
from dtlab.plots.palette import PAPER, QUIET, LineStyle, line_style
from dtlab.plots.picture import Picture, page
from dtlab.units import bytes_text, seconds_text

WIDTH_IN = 11.0
ABOVE = {"loc": "lower left", "bbox_to_anchor": (-0.03, 1.0), "columnspacing": 1.4}
BESIDE = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.02), "handlelength": 3}
INSIDE = {"loc": "upper right", "frameon": True, "facecolor": PAPER, "edgecolor": "none",
          "framealpha": 1.0}
DOTTED = LineStyle(QUIET, ":", "")  # bounds, and what is not to be looked at first
DASHED = LineStyle(QUIET, (0, (5, 2)), "")


class Series(NamedTuple):
    """Points in order of x. y: one value each, or all repeats of a measurement, see `draw_spread`.

    style: with dashes "none", only its markers are drawn. fill: of the markers, "" for the line's
    colour. every: which points have a marker, as matplotlib's `markevery`. name: in the legend.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float] | Sequence[Sequence[float]]
    style: LineStyle
    fill: str = ""
    every: Any = None

    def draw(self, axes: Axes) -> None:
        """Draw it on axes."""
        color, dashes, marker = self.style
        if len(self.y) and np.ndim(self.y[0]):
            draw_spread(axes, self.x, self.y, color=color, marker=marker, fill=self.fill or color,
                        label=self.name)
        elif len(self.x):
            open_marks = {"markersize": 10, "markeredgewidth": 2.5} if dashes == "none" else {}
            axes.plot(self.x, self.y, color=color, linestyle=dashes, marker=marker, zorder=3,
                      markerfacecolor=self.fill or color, markevery=self.every,
                      linewidth=2 if self.style in (DOTTED, DASHED) else None,
                      label=self.name or "_", **open_marks)  # type: ignore[arg-type]


class Scale(NamedTuple):
    """One axis: its label, and the words for a value. base: of its logarithm, 0 if it is linear.
    ticks: where numbers stand (None: at powers of the base); digits: and at these times them."""

    label: str
    text: Callable[[float], str] = "{:g}".format
    base: int = 10
    ticks: Sequence[float] | None = None
    digits: tuple[float, ...] = (1.0,)

    def apply(self, axis: XAxis | YAxis) -> None:
        """Give an axis this scale."""
        axis.set_label_text(self.label)
        if not self.base:
            return
        across = isinstance(axis, XAxis)
        (axis.axes.set_xscale if across else axis.axes.set_yscale)("log", base=self.base)
        axis.set_major_locator(LogLocator(self.base, self.digits, numticks=14)
                               if self.ticks is None else FixedLocator(list(self.ticks)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: self.text(value)))


SIZE = Scale("size of the vector (bytes)", bytes_text)
TIME = Scale("time", seconds_text)


@contextmanager
def lines(series: Sequence[Series], title: str, note: str, x: Scale, y: Scale,
          legend: Mapping[str, Any] = ABOVE, *, height_in: float = 6.0, right_in: float = 0.35,
          top_in: float = 1.0) -> Iterator[tuple[Picture, Axes]]:
    """Make a page with the chart of `series`. Inside, the caller adds what this chart alone has; at
    the end, whatever has a label gets its place in the legend: `ABOVE`, `BESIDE` or `INSIDE` the
    axes. The title must say "measured", "simulated" or "predicted"."""
    with page(WIDTH_IN, height_in, title, note) as picture:
        axes = picture.place(left=1.25, right=right_in, bottom=0.85, top=top_in)
        for each in series:
            each.draw(axes)
        x.apply(axes.xaxis)
        y.apply(axes.yaxis)
        axes.grid(True, which="major")
        yield picture, axes
        axes.legend(**legend)


def draw_spread(axes: Axes, places: Sequence[float], repeats: Sequence[Any], *, color: str,
                marker: str, fill: str, label: str = "", across: bool = False) -> None:
    """Draw the median as a dot, the middle half of the repeats as a thick bar, all as a thin one.

    places: where along the other axis. across: whether the repeats lie along x rather than y.
    """
    shares = (0, 25, 50, 75, 100)
    least, lower, middle, upper, most = np.array([np.percentile(r, shares) for r in repeats]).T
    bars = axes.hlines if across else axes.vlines
    bars(places, least, most, color=color, linewidth=1.6, zorder=4)
    bars(places, lower, upper, color=color, linewidth=7, alpha=0.45, zorder=4)
    x, y = (middle, places) if across else (places, middle)
    axes.plot(x, y, linestyle="", marker=marker, markersize=10, color=color,
              markerfacecolor=fill, markeredgewidth=2.5, zorder=5, label=label or "_")


def style_of(collective: str, name: str, otherwise: int) -> LineStyle:
    """An algorithm looks the same in every picture: its place in the registry says how."""
    known = list(ALGORITHMS.get(collective, {}))
    return line_style(known.index(name) if name in known else otherwise)


def powers_of_two(least: float, most: float) -> list[float]:
    """Return the powers of two from `least` to `most`; `least` itself if there is none."""
    return [2.0**k for k in range(32) if least <= 2**k <= most] or [least]
