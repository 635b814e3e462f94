"""Time against one number that can be chosen freely, such as a chain's segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dtlab.errors import ConfigError
from dtlab.plots.curves import logarithmic
from dtlab.plots.palette import HUES, INK, PAPER, QUIET
from dtlab.plots.picture import Picture, new_picture, place_axes, styled, write_title
from dtlab.plots.units import seconds_text


def sweep(
    predicted: Callable[[float], float],
    simulated: Mapping[int, float],
    *,
    best: float,
    bound_s: float,
    what: str = "segments",
    title: str = "Time against the number of segments",
    dpi: float = 100,
) -> Picture:
    """The curve `predicted(k)`, in seconds, and dots at `simulated` {k: seconds}; both axes
    logarithmic. A dashed line marks k = `best`, a dotted one the bound below all.

    Raises `ConfigError` unless there are two dots or more, at k of 1 or more.
    """
    if len(simulated) < 2 or min(simulated) < 1:
        raise ConfigError("a sweep needs two numbers or more, each 1 or more")
    counts, times = list(simulated), list(simulated.values())
    grid = np.geomspace(min(counts), max(counts), 200)
    said = (f"best: {best:,.0f} {what}, {seconds_text(predicted(best))} · "
            f"least of all: {seconds_text(bound_s)}")
    with styled():
        picture = new_picture(11, 5.2, dpi)
        write_title(picture, f"{title} (predicted and simulated)", said)
        axes = place_axes(picture, left=1.25, right=0.35, bottom=0.85, top=1.0)
        axes.plot(grid, [predicted(k) for k in grid], color=HUES[0], label="predicted", zorder=3)
        axes.plot(counts, times, "o", ms=10, mfc=PAPER, mec=INK, mew=2, zorder=4,
                  label="simulated")
        axes.axhline(bound_s, color=QUIET, lw=2, ls=":", label="lower bound")
        axes.axvline(best, color=QUIET, lw=1.5, ls=(0, (4, 3)), zorder=1, label="best, by formula")
        axes.set_ylim(min(bound_s, *times) / 1.6, max(times) * 1.6)
        logarithmic(axes, x=False)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(10))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda k, _: f"{k:,.0f}"))
        axes.set_xlabel(what)
        axes.legend(loc="upper right", ncols=2, frameon=True, facecolor=PAPER, edgecolor="none",
                    framealpha=1.0)
    dots = "; ".join(f"{k:,}: {seconds_text(t)}" for k, t in simulated.items())
    picture.alt = f"{title} (predicted and simulated). {said}. Simulated: {dots}."
    return picture
