"""How training went: loss against time or gradients, against a setting, and how stale it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dtlab.errors import ConfigError
from dtlab.plots.palette import INK, PAPER, QUIET, line_style
from dtlab.plots.picture import Picture, clock_name, new_picture, place_axes, styled, write_title
from dtlab.plots.spread import draw_spread

Curve = Sequence[tuple[float, float]]  # (x, loss), by x


def loss_curves(runs: Mapping[str, Sequence[Curve]], x_label: str, title: str = "Loss", *,
                subtitle: str = "", virtual: bool = True, dpi: float = 100) -> Picture:
    """Loss against time, gradients or bytes. runs: name → one curve a seed.

    A thin line is one seed; the thick one is their median, as far as all of them reach. The loss is
    cross-entropy, in nats, on a logarithmic axis. Raises `ConfigError` if there is nothing to draw.
    """
    if not runs or not all(curves and all(map(len, curves)) for curves in runs.values()):
        raise ConfigError("loss_curves needs at least one curve, with a point, for each name")
    heading = f"{title} ({clock_name(virtual)})"
    with styled():
        picture = new_picture(11, 5.8, dpi)
        write_title(picture, heading, subtitle)
        rows = -(-len(runs) // 3)  # of the legend, above the axes
        axes = place_axes(picture, left=1.15, right=0.4, bottom=0.9, top=1.15 + 0.35 * rows)
        note = []
        for index, (name, curves) in enumerate(runs.items()):
            x, y = _median(curves)
            _draw_curve(axes, index, name, curves, x, y)
            note.append(f"{name}: {y[-1]:.2g} at {x[-1]:.3g}")
        axes.set_xlabel(x_label)
        axes.set_xlim(left=0)
        _loss_axis(axes)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.03, 1.0), ncols=3, handlelength=4)
    picture.alt = f"{heading}. {subtitle} Median loss at the end, {x_label}: {'; '.join(note)}."
    return picture


def _draw_curve(axes: Axes, index: int, name: str, curves: Sequence[Curve], x: np.ndarray,
                y: np.ndarray) -> None:
    style = line_style(index)
    if len(curves) > 1:
        for curve in curves:
            axes.plot(*zip(*curve, strict=True), color=style.color, linewidth=1, alpha=0.45)
    axes.plot(x, y, color=style.color, linestyle=style.dashes, marker=style.marker, label=name,
              markevery=(3 + 4 * index, 18))


def _median(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """The median curve, over where all of them are."""
    first = max(curve[0][0] for curve in curves)
    last = min(curve[-1][0] for curve in curves)
    x = np.linspace(first, max(first, last), 80)
    each = [np.interp(x, *np.array(curve, float).T) for curve in curves]
    return x, np.median(each, axis=0)


def loss_sweep(
    losses: Mapping[str, Mapping[float, Sequence[float]]], x_label: str, title: str = "Loss", *,
    subtitle: str = "", limits: Mapping[str, float] | None = None, ceiling: float = 4.0,
    dpi: float = 100,
) -> Picture:
    """Loss at the end of training against a setting, both axes logarithmic.

    losses: name → setting → the loss of each seed. A dot is the median, its bar holds all seeds.
    What is above `ceiling`, or no number, has diverged: it stands as a cross at the upper edge.
    limits: name → the setting from which on it is predicted to diverge, a dotted line.
    """
    if not losses or not all(losses.values()):
        raise ConfigError("loss_sweep needs at least one loss for each name")
    heading = f"{title} (simulated)"
    places = sorted({x for found in losses.values() for x in found})
    with styled():
        picture = new_picture(11, 6.0, dpi)
        write_title(picture, heading, subtitle)
        axes = place_axes(picture, left=1.15, right=0.4, bottom=0.9, top=1.5)
        note = []
        for index, (name, found) in enumerate(losses.items()):
            note.append(f"{name}: " + _draw_sweep(axes, index, name, found, ceiling))
            if limits and name in limits:
                axes.axvline(limits[name], color=line_style(index).color, linestyle=":", zorder=1)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(places))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.set_xlabel(x_label)
        _loss_axis(axes)
        axes.set_ylim(top=ceiling * 1.25)
        axes.text(0.012, ceiling, "✗ diverged", color=QUIET, size=12, va="center", zorder=7,
                  transform=axes.get_yaxis_transform(),
                  bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 2})
        axes.legend(loc="lower left", bbox_to_anchor=(-0.03, 1.0), ncols=4, handlelength=3,
                    columnspacing=1.4)
    predicted = "".join(f" {name} is predicted to diverge above {x:.2g}."
                        for name, x in (limits or {}).items())
    picture.alt = f"{heading}. {subtitle} {'; '.join(note)}.{predicted}"
    return picture


def _draw_sweep(axes: Axes, index: int, name: str, found: Mapping[float, Sequence[float]],
                ceiling: float) -> str:
    """One curve of a sweep; returns it in words."""
    style = line_style(index)
    x = sorted(found)
    seen = [np.minimum(np.nan_to_num(np.asarray(found[at], float), nan=np.inf), ceiling)
            for at in x]
    middle = [float(np.median(each)) for each in seen]
    kept = [value < ceiling for value in middle]
    axes.plot(x, middle, color=style.color, linestyle=style.dashes, zorder=3, marker=style.marker,
              markevery=kept, label=name)
    draw_spread(axes, [at for at, stays in zip(x, kept, strict=True) if stays],
                [list(each) for each, stays in zip(seen, kept, strict=True) if stays],
                color=style.color, marker=style.marker, fill=style.color)
    gone = [at for at, stays in zip(x, kept, strict=True) if not stays]
    axes.plot(gone, [ceiling] * len(gone), linestyle="", marker="x", markersize=13,
              markeredgewidth=4, color=style.color, zorder=6)
    return ", ".join(f"{at:g} " + ("diverged" if value >= ceiling else f"{value:.2f}")
                     for at, value in zip(x, middle, strict=True))


def staleness_histograms(seen: Mapping[str, Mapping[int, int]], title: str = "Staleness", *,
                         dpi: float = 100) -> Picture:
    """How many gradients had missed how many updates: one panel a name, the mean as a line.

    seen: name → staleness → gradients, as `Statistics.staleness`.
    """
    if not seen or not all(sum(counts.values()) for counts in seen.values()):
        raise ConfigError("staleness_histograms needs at least one gradient for each name")
    heading = f"{title} (simulated)"
    most = max(max(counts) for counts in seen.values())
    highest = max(max(counts.values()) / sum(counts.values()) for counts in seen.values()) * 100
    note = []
    with styled():
        picture = new_picture(11, 4.6, dpi)
        write_title(picture, heading, "how many updates a gradient had missed when it arrived")
        wide = (11 - 1.0 - 0.3) / len(seen)
        for index, (name, counts) in enumerate(seen.items()):
            left = 1.0 + index * wide
            axes = place_axes(picture, left=left, right=11 - left - wide + 0.25, bottom=0.9,
                              top=1.45)
            total = sum(counts.values())
            mean = sum(s * n for s, n in counts.items()) / total
            axes.bar(list(counts), [n / total * 100 for n in counts.values()],
                     color=line_style(index).color, edgecolor=INK, width=0.85)
            axes.axvline(mean, color=INK, linestyle=(0, (4, 2)), linewidth=2)
            axes.set_title(f"{name}\nmean {mean:.2f}", size=13, weight="normal", pad=6)
            axes.set_xlim(-0.7, most + 0.7)
            axes.set_ylim(0, highest * 1.1)
            axes.set_xlabel("staleness (updates)" if wide > 2.2 else "(updates)")
            if index:
                axes.set_yticklabels([])
            else:
                axes.set_ylabel("of gradients (%)")
            note.append(f"{name}: mean {mean:.2f}, at most {max(counts)}")
    picture.alt = f"{heading}. {'; '.join(note)}."
    return picture


def _loss_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator([d * 10.0**e for e in range(-4, 4)
                                               for d in (1, 2, 5)]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.set_ylabel("loss (nats)")
    axes.grid(True, axis="y")
