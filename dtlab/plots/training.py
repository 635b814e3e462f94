"""Pictures of training: loss against time or gradients, and against a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator

from dtlab.errors import ConfigError
from dtlab.plots.lines import ABOVE, Scale, Series, lines
from dtlab.plots.palette import PAPER, QUIET, line_style
from dtlab.plots.picture import Picture, clock_name

Curve = Sequence[tuple[float, float]]  # (x, loss), by x
LOSS = Scale("loss (nats)", ticks=[d * 10.0**e for e in range(-4, 4) for d in (1, 2, 5)])


def loss_curves(runs: Mapping[str, Sequence[Curve]], x_label: str, title: str = "Loss", *,
                subtitle: str = "", virtual: bool = True) -> Picture:
    """Loss against time, gradients or bytes. runs: name → one curve a seed.

    A thin line is one seed; the thick one is their median, as far as all of them reach. The loss is
    cross-entropy, in nats, on a logarithmic axis. Raises `ConfigError` if there is nothing to draw.
    """
    if not runs or not all(curves and all(map(len, curves)) for curves in runs.values()):
        raise ConfigError("loss_curves needs at least one curve, with a point, for each name")
    heading = f"{title} ({clock_name(virtual)})"
    series = [Series(name, *_median(curves), line_style(index), every=(3 + 4 * index, 18))
              for index, (name, curves) in enumerate(runs.items())]
    with lines(series, heading, subtitle, Scale(x_label, base=0), LOSS,
               ABOVE | {"ncols": 3, "handlelength": 4, "columnspacing": 2}, height_in=5.8,
               top_in=1.15 + 0.35 * -(-len(runs) // 3)) as (picture, axes):
        for each, curves in zip(series, runs.values(), strict=True):
            for curve in curves if len(curves) > 1 else ():
                axes.plot(*zip(*curve, strict=True), color=each.style.color, linewidth=1,
                          alpha=0.45)
        axes.set_xlim(left=0)
        axes.grid(False, axis="x")
        _enough_ticks(axes)
    note = [f"{name}: {y[-1]:.2g} at {x[-1]:.3g}" for name, x, y, *_ in series]
    picture.alt = f"{heading}. {subtitle} Median loss at the end, {x_label}: {'; '.join(note)}."
    return picture


def _enough_ticks(axes: Axes) -> None:
    """Set three ticks or more on the axis of the loss, also where it hardly falls."""
    low, high = axes.get_ylim()
    if sum(low <= tick <= high for tick in LOSS.ticks or ()) < 3:
        axes.yaxis.set_major_locator(FixedLocator(MaxNLocator(5).tick_values(low, high)))
        axes.set_ylim(low, high)


def _median(curves: Sequence[Curve]) -> tuple[list[float], list[float]]:
    """The median curve, over where all of them are."""
    first = max(curve[0][0] for curve in curves)
    last = min(curve[-1][0] for curve in curves)
    x = np.linspace(first, max(first, last), 80)
    each = [np.interp(x, *np.array(curve, float).T) for curve in curves]
    return x.tolist(), np.median(each, axis=0).tolist()


def loss_sweep(losses: Mapping[str, Mapping[float, Sequence[float]]], x_label: str,
               title: str = "Loss", *, subtitle: str = "",
               limits: Mapping[str, float] | None = None, ceiling: float = 4.0) -> Picture:
    """Loss at the end of training against a setting, both axes logarithmic.

    losses: name → setting → the loss of each seed. A dot is the median, its bar holds all seeds.
    A loss above `ceiling`, or NaN, has diverged: it stands as a cross at the upper edge.
    limits: name → the setting from which on it is predicted to diverge, a dotted line. Raises
    `ConfigError` unless each name has settings above 0, with a loss or more.
    """
    settings = [each for found in losses.values() for each in found.items()]
    if not losses or not all(losses.values()) or not all(x > 0 and len(s) for x, s in settings):
        raise ConfigError("loss_sweep needs at least one loss for each name and setting, and "
                          "settings above 0")
    heading, limits = f"{title} (simulated)", limits or {}
    series, note = [], []
    for index, (name, found) in enumerate(losses.items()):
        style = line_style(index)
        seen = {x: np.fmin(found[x], ceiling).tolist() for x in sorted(found)}
        middle = {x: float(np.median(each)) for x, each in seen.items()}
        kept = {x: each for x, each in seen.items() if middle[x] < ceiling}
        gone = [x for x in seen if x not in kept]
        series += [
            Series(name, list(seen), list(middle.values()), style,
                   every=[x in kept for x in seen]),
            Series("", list(kept), list(kept.values()), style),
            Series("", gone, [ceiling] * len(gone), style._replace(dashes="none", marker="x"))]
        note.append(f"{name}: " + ", ".join(
            f"{x:g} " + (f"{loss:.2f}" if x in kept else "diverged") for x, loss in middle.items()))
    places = sorted({x for found in losses.values() for x in found})
    with lines(series, heading, subtitle, Scale(x_label, ticks=places), LOSS,
               ABOVE | {"ncols": 4, "handlelength": 3}, top_in=1.5) as (picture, axes):
        for index, name in enumerate(losses):
            if name in limits:
                axes.axvline(limits[name], color=line_style(index).color, linestyle=":", zorder=1)
        axes.set_ylim(top=ceiling * 1.25)
        axes.grid(False, axis="x")
        axes.text(0.012, ceiling, "✗ diverged", color=QUIET, size=12, va="center", zorder=7,
                  transform=axes.get_yaxis_transform(),
                  bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 2})
    predicted = "".join(f" {name} is predicted to diverge above {x:.2g}."
                        for name, x in limits.items())
    picture.alt = f"{heading}. {subtitle} {'; '.join(note)}.{predicted}"
    return picture
