"""Predictions and measurements side by side: a row each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dtlab.errors import ConfigError
from dtlab.plots.lines import TIME, draw_spread
from dtlab.plots.palette import ALARM, FAINT, HUES, INK, PAPER
from dtlab.plots.picture import Picture, fit_text, page
from dtlab.units import seconds_text

Row = tuple[str, float, float | Sequence[float]]  # what, predicted seconds, measured seconds


def predicted_vs_measured(
    rows: Sequence[Row], *, title: str = "Predicted and measured time") -> Picture:
    """One line for each row (what, predicted seconds, measured seconds: one or several).

    ◆ predicted; ● median measured, with a bar over the middle half of the repeats and a line over
    all; at the right, how many times longer it took than predicted. Raises `ConfigError`
    without rows, or for a row without measured time.
    """
    if not rows:
        raise ConfigError("predicted_vs_measured needs at least one row")
    table = [(what, float(guess), np.atleast_1d(np.asarray(times, float)).tolist())
             for what, guess, times in rows]
    for what, _, times in table:
        if not times:
            raise ConfigError(f"predicted_vs_measured needs a measured time of {what!r}")
    height = 0.5 * len(table) + 2.1
    left = min(4.4, max(2.0, 0.125 * max(len(what) for what, _, _ in table) + 0.6))
    ratios = [float(np.median(times)) / guess if guess else float("inf")
              for _, guess, times in table]
    with page(11, height, title, "bar: the middle half of the repeats; line: all of them; "
                                     "at the right: measured / predicted") as picture:
        axes = picture.place(left=left, right=1.2, bottom=0.85, top=1.0)
        for row, (what, guess, times) in enumerate(table):
            draw_spread(axes, [row], [times], color=HUES[0], marker="o", fill=HUES[0],
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
        TIME.apply(axes.xaxis)
        shortest_s, longest_s = axes.get_xlim()
        if longest_s < 100 * shortest_s:  # else a decade alone could bear a single tick
            TIME._replace(digits=(1.0, 2.0, 5.0)).apply(axes.xaxis)
        axes.grid(axis="x", color=FAINT)
        picture.legend(loc="lower right", bbox_to_anchor=(0.99, 0.01), ncols=2)
    note = "; ".join(f"{what}: predicted {seconds_text(guess)}, measured "
                     f"{seconds_text(float(np.median(times)))}" for what, guess, times in table)
    picture.alt = f"{title}. {note}."
    return picture
