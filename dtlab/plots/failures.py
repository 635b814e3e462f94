"""The cost of failures: nodes' productive time, and its share by the interval between saves."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from dtlab import cost
from dtlab.checks import check_positive
from dtlab.plots.palette import ALARM, FAINT, HUES, INK, PAPER, QUIET, line_style
from dtlab.plots.picture import Picture, page
from dtlab.plots.training_time import days_text
from dtlab.reliability import Goodput

WIDTH_IN, MOST_ROWS = 11.0, 32
# Kind → colour and height of its bar: what is lower is told apart without colour, too.
LOOKS = {"productive": (HUES[2], 0.86), "redone": (HUES[1], 0.56), "blocked": (ALARM, 0.28),
         "absent": (QUIET, 0.1)}
UNITS = ((86_400, "days"), (3600, "hours"), (60, "min"), (1, "s"))  # of the time axis


def failures(run: Goodput, until_s: float = math.inf, *, curve: bool = False) -> Picture:
    """A row for each node, its time productive, redone, blocked or absent, up to `until_s`; at most
    32 nodes. curve: below, `useful_share` for the same failures, and a dot for what was simulated.
    """
    rows = min(run.options.nodes, MOST_ROWS)
    end_s = min(until_s, run.duration_s, run.timeline[-1].end_s)
    heading = f"{run.options.nodes} nodes, answer to a failure: {run.options.answer} (simulated)"
    shares = " · ".join(f"{kind} {share:.1%}" for kind, share in run.shares.items())
    note = f"{shares} of {days_text(run.duration_s)}; {run.failures:,} failures"
    note += f"; {rows} of the nodes" if rows < run.options.nodes else ""
    rows_in, below_in = max(1.2, 0.23 * rows), 2.6 if curve else 0.0
    with page(WIDTH_IN, 2.05 + rows_in + below_in, heading, note) as picture:
        axes = picture.place(left=1.2, right=0.35, bottom=0.75 + below_in, top=1.3)
        _draw_rows(axes, run, rows, end_s)
        handles = [Patch(facecolor=color, label=kind) for kind, (color, _) in LOOKS.items()]
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4,
                    frameon=False, fontsize=13, borderaxespad=0.2)
        if curve:
            below = picture.place(left=1.2, right=0.35, bottom=0.75, top=2.4 + rows_in)
            _draw_curve(below, run.save_s, run.restart_s, run.mttf_s, (run.interval_s, run.share))
    picture.alt = f"{heading}: {note}."
    return picture


def useful_share(save_s: float, restart_s: float, mttf_s: float) -> Picture:
    """The share of time that is new work against the interval between saves, under failures at all
    times (`cost.useful_share`) and under none during recovery (`cost.availability`), each with its
    best interval. save_s: above 0, or it would be best to save all the time."""
    check_positive("save_s", save_s)
    best = cost.daly_interval_s(save_s, mttf_s)
    other = cost.availability_interval_s(save_s, restart_s, mttf_s)
    heading = "Which interval between saves? (predicted)"
    note = (f"a failure every {days_text(mttf_s)}, save {days_text(save_s)}, restart "
            f"{days_text(restart_s)}: best {days_text(best)}; {days_text(other)} if recovery never "
            f"failed")
    with page(WIDTH_IN, 5.2, heading, note) as picture:
        axes = picture.place(left=1.2, right=0.35, bottom=0.75, top=1.4)
        _draw_curve(axes, save_s, restart_s, mttf_s)
    picture.alt = f"{heading}: {note}."
    return picture


def _draw_rows(axes: Axes, run: Goodput, rows: int, end_s: float) -> None:
    unit_s, unit = next(u for u in UNITS if end_s >= 2 * u[0] or u[0] == 1)
    shown = [interval for interval in run.timeline if interval.start_s < end_s]
    times = np.array([(start_s, min(stop_s, end_s)) for start_s, stop_s, *_ in shown]) / unit_s
    kinds = np.array([["absent" if place in absent else kind for place in range(rows)]
                      for *_, kind, absent in shown])
    for kind, (color, height) in LOOKS.items():
        which, place = np.nonzero(kinds == kind)
        left, right, low, high = *times[which].T, place - height / 2, place + height / 2
        corners = np.stack([left, low, left, high, right, high, right, low], axis=1)
        axes.add_collection(PolyCollection(list(corners.reshape(-1, 4, 2)), facecolors=color,
                                           linewidths=0))
    few = range(0, rows, math.ceil(rows / 4))
    axes.set_yticks(few, [f"node {place}" for place in few])
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xlim(0, end_s / unit_s)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time ({unit})", loc="right")


def _draw_curve(axes: Axes, save_s: float, restart_s: float, mttf_s: float,
                played: tuple[float, float] | None = None) -> None:
    case = save_s, restart_s, mttf_s
    marks = (cost.daly_interval_s(save_s, mttf_s), cost.availability_interval_s(*case))
    ends = [0.04 * marks[0], 25 * marks[0], *(played or ())[:1]]
    low, high = min(ends), max(ends)
    grid = sorted([low * (high / low) ** (k / 80) for k in range(81)] + list(marks))
    forms = (("restart", cost.useful_share),
             ("if recovery never fails", cost.availability))
    for number, ((name, form), best_s) in enumerate(zip(forms, marks, strict=True)):
        style = line_style(number)
        axes.plot([s / 60 for s in grid], [100 * form(s, *case) for s in grid], color=style.color,
                  linestyle=style.dashes, marker=style.marker, markevery=[grid.index(best_s)],
                  markersize=(9, 15)[number], markerfacecolor=(style.color, PAPER)[number],
                  markeredgewidth=2, zorder=4 - number, label=f"{name}: best {days_text(best_s)}")
    if played:
        axes.plot(played[0] / 60, 100 * played[1], "X", color=INK, markersize=12, zorder=5,
                  markeredgecolor=PAPER, label=f"simulated: {days_text(played[0])}")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_ylim(0, 105)
    axes.set_yticks(range(0, 101, 50))
    axes.set_xlabel("work between saves (min)", loc="right")
    axes.set_ylabel("productive (%)")
    axes.grid(True, which="major", color=FAINT)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.08, 1.0), ncols=3, frameon=False, fontsize=12,
                borderaxespad=0.2, columnspacing=1.2)
