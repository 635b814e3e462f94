"""Measurements beside what was predicted: the α–β fit, and any list of predictions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from dtlab.errors import ConfigError
from dtlab.plots.curves import logarithmic, machine_text
from dtlab.plots.palette import ALARM, FAINT, HUES, INK, PAPER, QUIET
from dtlab.plots.picture import (
    Picture,
    clock_name,
    fit_text,
    new_picture,
    place_axes,
    styled,
    write_title,
)
from dtlab.plots.spread import draw_spread
from dtlab.plots.units import bytes_text, count_text, seconds_text

Repeats = Sequence[float] | Sequence[Sequence[float]]  # one time a size, or several
Row = tuple[str, float, float | Sequence[float]]  # what, predicted seconds, measured seconds
_USED, _HELD_OUT = HUES[0], HUES[3]


def fit(
    alpha: float,
    beta: float,
    sizes: Sequence[int],
    times: Repeats,
    held_out: tuple[Sequence[int], Repeats] | None = None,
    *,
    title: str = "One message",
    virtual: bool = False,
    dpi: float = 100,
) -> Picture:
    """Times of messages against their size, and the line α + nβ fitted to them.

    sizes: bytes, more than 0. times: seconds, one or several repeats a size; the dot is their
    median, the bar holds their middle half, the line all. held_out: sizes and times the fit has
    not seen; the subtitle says how far off the line is there. Raises `ConfigError` if the lengths
    differ.
    """
    seen = _repeats(sizes, times)
    unseen = _repeats(*held_out) if held_out else []
    if not seen:
        raise ConfigError("fit needs at least one measured size")
    everything = seen + unseen
    half = alpha / beta if beta > 0 else float("inf")
    heading = f"{title}: time against size ({clock_name(virtual)})"
    found = f"fitted: {machine_text(alpha, beta)}"
    if unseen:
        found += f" · off by {_error(alpha, beta, unseen):.0%} (median) at held-out sizes"
    with styled():
        picture = new_picture(11, 6.3, dpi)
        write_title(picture, heading, found)
        axes = place_axes(picture, left=1.25, right=0.35, bottom=0.85, top=1.35)
        low, high = min(n for n, _ in everything) / 2, max(n for n, _ in everything) * 2
        _draw_line(axes, alpha, beta, np.geomspace(low, high, 200))
        _dots(axes, seen, "o", _USED, _USED, "measured, fitted to")
        _dots(axes, unseen, "s", PAPER, _HELD_OUT, "measured, held out")
        axes.set_xlim(low, high)
        lowest = min(float(t.min()) for _, t in everything)
        highest = max(float(t.max()) for _, t in everything)
        axes.set_ylim(min(lowest, alpha if alpha > 0 else lowest) / 2, highest * 2)
        logarithmic(axes)
        axes.set_xlabel("size of the message (bytes)")
        if low < half < high:
            _mark_half(axes, half)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.07, 1.0), ncols=5, handlelength=2,
                    columnspacing=1.4)  # above: bars may reach anywhere
    picture.alt = (f"{heading}. {found}. {count_text(len(seen), 'size')} fitted, "
                   f"{len(unseen)} held out, {bytes_text(low * 2)} to {bytes_text(high / 2)}.")
    return picture


def _draw_line(axes: Axes, alpha: float, beta: float, grid: np.ndarray) -> None:
    """α + nβ, and each of its two terms alone."""
    axes.plot(grid, alpha + beta * grid, color=INK, label="α + nβ", zorder=3)
    axes.plot(grid, np.full_like(grid, alpha), color=QUIET, lw=2, ls=":", label="α alone")
    axes.plot(grid, beta * grid, color=QUIET, lw=2, ls=(0, (5, 2)), label="nβ alone")


def _repeats(sizes: Sequence[int], times: Repeats) -> list[tuple[int, np.ndarray]]:
    if len(sizes) != len(times):
        raise ConfigError(f"{len(sizes)} sizes but {len(times)} times; give one entry for each")
    return [(n, np.atleast_1d(np.asarray(t, float))) for n, t in zip(sizes, times, strict=True)]


def _error(alpha: float, beta: float, rows: list[tuple[int, np.ndarray]]) -> float:
    """Median, over sizes, of |predicted − median measured| / measured."""
    medians = [(n, float(np.median(t))) for n, t in rows]
    return float(np.median([abs(alpha + n * beta - t) / t for n, t in medians]))


def _dots(axes: Axes, rows: list[tuple[int, np.ndarray]], marker: str, fill: str, edge: str,
          label: str) -> None:
    draw_spread(axes, [n for n, _ in rows], [t.tolist() for _, t in rows], color=edge,
                marker=marker, fill=fill, label=label)


def _mark_half(axes: Axes, half: float) -> None:
    """Where latency and bandwidth cost the same: n = α/β."""
    axes.axvline(half, color=QUIET, lw=1.5, ls=(0, (2, 3)), zorder=1)
    low, high = axes.get_xlim()
    left = half > (low * high) ** 0.5  # of the line there is more room, on a logarithmic axis
    axes.annotate(f"n = α/β = {bytes_text(half)}:\nhalf latency, half bandwidth",
                  (half, 0.04), xycoords=("data", "axes fraction"), xytext=(-8 if left else 8, 0),
                  textcoords="offset points", size=12, color=INK, va="bottom",
                  ha="right" if left else "left",
                  bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 2})


def predicted_vs_measured(
    rows: Sequence[Row], *, title: str = "Predicted and measured time", dpi: float = 100
) -> Picture:
    """One line for each row (what, predicted seconds, measured seconds: one or several).

    ◆ predicted; ● median measured, with a bar over the middle half of the repeats and a line over
    all; at the right, how many times longer it took than predicted. Raises `ConfigError`
    without rows.
    """
    if not rows:
        raise ConfigError("predicted_vs_measured needs at least one row")
    table = [(what, float(guess), np.atleast_1d(np.asarray(times, float)))
             for what, guess, times in rows]
    height = 0.5 * len(table) + 2.1
    left = min(4.4, max(2.0, 0.125 * max(len(what) for what, _, _ in table) + 0.6))
    ratios = [float(np.median(times)) / guess if guess else float("inf")
              for _, guess, times in table]
    with styled():
        picture = new_picture(11, height, dpi)
        write_title(picture, title, "bar: the middle half of the repeats; line: all of them; "
                                     "at the right: measured / predicted")
        axes = place_axes(picture, left=left, right=1.2, bottom=0.85, top=1.0)
        for row, (what, guess, times) in enumerate(table):
            draw_spread(axes, [row], [times.tolist()], color=_USED, marker="o", fill=_USED,
                        label="" if row else "measured", across=True)
            axes.plot(guess, row, "D", mfc=PAPER, mec=INK, mew=2, zorder=6,
                      label=None if row else "predicted")
            off = 1.0 / 1.5 <= ratios[row] <= 1.5
            axes.text(1.015, row, f"× {ratios[row]:.2f}", transform=axes.get_yaxis_transform(),
                      va="center", color=INK if off else ALARM, weight="normal" if off else "bold")
            fit_text(axes.text(-0.02, row, what, transform=axes.get_yaxis_transform(),
                               ha="right", va="center"), left - 0.45)
        axes.set_yticks([])
        axes.set_ylim(len(table) - 0.5, -0.5)
        axes.spines["left"].set_visible(False)
        logarithmic(axes, y=False)
        shortest_s, longest_s = axes.get_xlim()
        if longest_s < 100 * shortest_s:  # else a decade alone could bear a single tick
            axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5), numticks=12))
        _time_axis(axes)
        picture.legend(loc="lower right", bbox_to_anchor=(0.99, 0.01), ncols=2)
    note = "; ".join(f"{what}: predicted {seconds_text(guess)}, measured "
                     f"{seconds_text(float(np.median(times)))}" for what, guess, times in table)
    picture.alt = f"{title}. {note}."
    return picture


def _time_axis(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(lambda t, _: seconds_text(t))
    axes.set_xlabel("time")
    axes.grid(axis="x", color=FAINT)
