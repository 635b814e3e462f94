"""Steps and samples until a loss is reached, by batch."""

from __future__ import annotations

from collections.abc import Mapping

from dtlab import cost
from dtlab.checks import check_positive
from dtlab.plots.lines import ABOVE, Scale, Series, lines
from dtlab.plots.palette import INK, PAPER, QUIET, line_style
from dtlab.plots.picture import Picture

BATCHES, MOST = (1, 1 << 20), 300.0  # where the axes end: fixed, so that only the curves move
TIMES = Scale("steps, samples (times the least)", ticks=[1, 2, 5, 10, 20, 50, 100, 200])


def critical_batch(least_steps: float, critical: float, batch: int,
                   counted: Mapping[int, float] | None = None) -> Picture:
    """Steps and samples until a loss is reached, each as times the least, against the batch.

    The curves are `cost.steps_to_loss`; the solid line marks `batch`, the dashed one the
    `critical` batch, where they cross at 2. counted: batch → steps of runs, shown as dots.
    """
    steps = cost.steps_to_loss(batch, least_steps, critical)
    more, samples = steps / least_steps, steps * batch / (least_steps * critical)
    grid = [2 ** (k / 8) for k in range(161)]
    first, second = line_style(0), line_style(1)
    series = [Series("steps", grid, [1 + critical / b for b in grid], first._replace(marker="")),
              Series("samples", grid, [1 + b / critical for b in grid], second._replace(marker=""))]
    for value in (*(counted or {}), *(counted or {}).values()):
        check_positive("counted", value)
    if counted:
        dots = {b: s / least_steps for b, s in counted.items()}
        series += [
            Series("steps, counted", list(dots), list(dots.values()),
                   first._replace(dashes="none"), PAPER),
            Series("samples, counted", list(dots), [t * b / critical for b, t in dots.items()],
                   second._replace(dashes="none"), PAPER)]
    title = f"Until a loss is reached ({'predicted and counted' if counted else 'predicted'})"
    note = (f"a batch of {batch:,}: {steps:,.0f} steps, {more:,.3g} times the least; "
            f"{steps * batch:,.0f} samples, {samples:,.3g} times the least")
    ticks = [4**k for k in range(10)]
    with lines(series, title, note, Scale("batch (samples)", "{:,.0f}".format, 2, ticks),
               TIMES, ABOVE | {"ncols": 3}, height_in=5.6, top_in=1.85) as (picture, axes):
        axes.set_xlim(*BATCHES)
        axes.set_ylim(0.8, MOST)
        axes.axvline(critical, color=QUIET, linestyle=(0, (5, 2)),
                     label=f"critical batch {critical:,.0f}")
        axes.axvline(batch, color=INK, linewidth=2, label=f"batch {batch:,}")
    picture.alt = f"{title}: {note}. The critical batch is {critical:,.0f}."
    return picture
