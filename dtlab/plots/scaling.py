"""Time against the number of ranks: what grows, what stays, and where one overtakes another."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from dtlab.errors import ConfigError
from dtlab.plots.curves import logarithmic, place_of
from dtlab.plots.palette import PAPER, line_style
from dtlab.plots.picture import Picture, new_picture, place_axes, styled, write_title
from dtlab.plots.units import seconds_text

ByRanks = Mapping[str, Mapping[int, float]]  # algorithm → ranks → seconds


def times_by_ranks(predicted: ByRanks, simulated: ByRanks | None = None, *,
                   title: str = "All-reduce", subtitle: str = "", dpi: float = 100) -> Picture:
    """Curves: predicted time of each algorithm, both axes logarithmic; open marks: simulated.

    predicted, simulated: algorithm → number of ranks → seconds. Raises `ConfigError` if there is
    nothing to draw, or ranks or seconds are not above 0.
    """
    points = [(p, s) for curves in (predicted, simulated or {}) for curve in curves.values()
              for p, s in curve.items()]
    if not points or not all(p > 0 and 0 < s < np.inf for p, s in points):
        raise ConfigError("times by ranks need at least one time; ranks and seconds above 0")
    heading = f"{title}: predicted{' and simulated' if simulated else ''} time"
    rows = -(-(len(predicted) + len(simulated or {})) // 2)  # of the legend, above the axes
    with styled():
        picture = new_picture(11, 6.0, dpi)
        write_title(picture, heading, subtitle)
        axes = place_axes(picture, left=1.25, right=0.35, bottom=0.85, top=1.1 + 0.27 * rows)
        logarithmic(axes, x=False)
        for index, (name, curve) in enumerate(predicted.items()):
            style = line_style(place_of("all_reduce", name, index))
            axes.plot(list(curve), list(curve.values()), color=style.color, label=name,
                      linestyle=style.dashes)
            marks = (simulated or {}).get(name, {})
            axes.plot(list(marks), list(marks.values()), color=style.color, linestyle="none",
                      marker=style.marker, markersize=10, markerfacecolor=PAPER,
                      markeredgewidth=2, label=f"{name}, simulated" if marks else None)
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
        ranks = sorted({p for p, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xlim(ranks[0] / 1.15, ranks[-1] * 1.15)
        powers = [2.0**k for k in range(32) if ranks[0] <= 2**k <= ranks[-1]]
        axes.xaxis.set_major_locator(FixedLocator(powers or [float(ranks[0])]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda p, _: f"{p:,.0f}"))
        axes.set_xlabel("number of ranks")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, handlelength=4,
                    labelspacing=0.35)
    ends = [f"{name} {seconds_text(curve[max(curve)])} on {max(curve):,} ranks"
            for name, curve in predicted.items() if curve]
    picture.alt = f"{heading}. {subtitle}. {'; '.join(ends)}."
    return picture
