"""Time against one number: a chain's segments, the ranks, the servers, the bytes of a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from dtlab import cost
from dtlab.checks import check_positive
from dtlab.errors import ConfigError
from dtlab.plots.curves import machine_text
from dtlab.plots.lines import (
    ABOVE,
    BESIDE,
    DASHED,
    DOTTED,
    INSIDE,
    SIZE,
    TIME,
    Scale,
    Series,
    lines,
    powers_of_two,
    style_of,
)
from dtlab.plots.palette import HUES, INK, PAPER, QUIET, LineStyle, line_style
from dtlab.plots.picture import Picture, clock_name
from dtlab.units import bytes_text, count_text, seconds_text

ByRanks = Mapping[str, Mapping[int, float]]  # algorithm → ranks → seconds
Repeats = Sequence[float] | Sequence[Sequence[float]]  # one time a size, or several
COUNT = "{:,.0f}".format


def sweep(predicted: Callable[[float], float], simulated: Mapping[int, float], *, best: float,
          bound_s: float, what: str = "segments", title: str = "Time against the number of segments"
          ) -> Picture:
    """The curve `predicted(k)`, in seconds, and dots at `simulated` {k: seconds}; both axes
    logarithmic. A dashed line marks k = `best`, a dotted one the bound below all.

    Raises `ConfigError` unless there are two dots or more, at k of 1 or more.
    """
    if len(simulated) < 2 or min(simulated) < 1:
        raise ConfigError("a sweep needs two numbers or more, each 1 or more")
    grid = np.geomspace(min(simulated), max(simulated), 200).tolist()
    times = list(simulated.values())
    heading = f"{title} (predicted and simulated)"
    said = (f"best: {best:,.0f} {what}, {seconds_text(predicted(best))} · "
            f"least of all: {seconds_text(bound_s)}")
    series = [Series("predicted", grid, [predicted(k) for k in grid], LineStyle(HUES[0], "-", "")),
              Series("simulated", list(simulated), times, LineStyle(INK, "none", "o"), PAPER),
              Series("lower bound", grid, [bound_s] * len(grid), DOTTED)]
    with lines(series, heading, said, Scale(what, COUNT), TIME, INSIDE | {"ncols": 2},
               height_in=5.2) as (picture, axes):
        axes.axvline(best, color=QUIET, lw=1.5, ls=(0, (4, 3)), zorder=1, label="best, by formula")
        axes.set_ylim(min(bound_s, *times) / 1.6, max(times) * 1.6)
    dots = "; ".join(f"{k:,}: {seconds_text(t)}" for k, t in simulated.items())
    picture.alt = f"{heading}. {said}. Simulated: {dots}."
    return picture


def times_by_ranks(predicted: ByRanks, simulated: ByRanks | None = None, *,
                   title: str = "All-reduce", subtitle: str = "") -> Picture:
    """Curves: predicted time of each algorithm, both axes logarithmic; open marks: simulated.

    predicted, simulated: algorithm → number of ranks → seconds. Raises `ConfigError` if there is
    nothing to draw, or ranks or seconds are not above 0.
    """
    checked = simulated or {}
    points = [(p, s) for curves in (predicted, checked) for curve in curves.values()
              for p, s in curve.items()]
    if not points or not all(p > 0 and 0 < s < np.inf for p, s in points):
        raise ConfigError("times by ranks need at least one time; ranks and seconds above 0")
    heading = f"{title}: predicted{' and simulated' if checked else ''} time"
    series = []
    for index, (name, curve) in enumerate(predicted.items()):
        style, marks = style_of("all_reduce", name, index), checked.get(name, {})
        series += [Series(name, list(curve), list(curve.values()), style._replace(marker="")),
                   Series(f"{name}, simulated", list(marks), list(marks.values()),
                          style._replace(dashes="none"), PAPER)]
    least, most = min(points)[0], max(points)[0]
    rows = -(-(len(predicted) + len(checked)) // 2)  # of the legend, above the axes
    with lines(series, heading, subtitle,
               Scale("number of ranks", COUNT, 2, powers_of_two(least, most)),
               TIME._replace(digits=(1.0, 2.0, 5.0)),
               ABOVE | {"ncols": 2, "handlelength": 4, "labelspacing": 0.35},
               top_in=1.1 + 0.27 * rows) as (picture, axes):
        axes.set_xlim(least / 1.15, most * 1.15)
    ends = [f"{name} {seconds_text(curve[max(curve)])} on {max(curve):,} ranks"
            for name, curve in predicted.items() if curve]
    picture.alt = f"{heading}. {subtitle}. {'; '.join(ends)}."
    return picture


def server_times(workers: Sequence[int] = (2, 4, 8, 16), nbytes: int = 160_000_000,
                 bandwidth_Bps: float = 16e9,
                 simulated: Mapping[int, Mapping[int, float]] | None = None) -> Picture:
    """Time of a push and a pull against the number of servers n, a line for each number of workers
    m: `cost.parameter_server_s`, all ports equal. simulated: m → n → seconds, as open marks."""
    simulated = simulated or {}
    if not workers or min(workers) < 1 or not set(simulated) <= set(workers):
        raise ConfigError("give at least one number of workers, 1 or more, and simulated times of "
                          "these only")
    most = max(workers)
    least_s = cost.parameter_server_s(1, 1, nbytes, bandwidth_Bps)
    title = (f"Push and pull, m workers and n servers: "
             f"{'predicted and simulated' if simulated else 'predicted'} time")
    note = (f"{bytes_text(nbytes)} each way and worker · every port {bytes_text(bandwidth_Bps)}/s "
            f"· push, then pull: {seconds_text(least_s)} at least")
    counts = np.unique(np.geomspace(1, 2 * most, 40).round()).tolist()
    series = [Series("", counts, [least_s] * len(counts), DOTTED)]
    for index, m in enumerate(workers):
        style, marks = line_style(index), simulated.get(m, {})
        times = [cost.parameter_server_s(m, int(n), nbytes, bandwidth_Bps) for n in counts]
        series += [Series(f"m = {m}", counts, times, style._replace(marker="")),
                   Series("", list(marks), list(marks.values()), style._replace(dashes="none"),
                          PAPER)]
    ticks = [least_s * k for k in powers_of_two(1, most)]
    with lines(series, title, note,
               Scale("number of servers n", base=2, ticks=powers_of_two(1, 2 * most)),
               TIME._replace(base=2, ticks=ticks), BESIDE | {"title": "workers"}, height_in=5.6,
               right_in=2.0, top_in=1.1) as (picture, _):
        pass
    ends = "; ".join(f"m = {m}: {seconds_text(m * least_s)} with one server, "
                     f"{seconds_text(least_s)} from n = {m} on" for m in workers)
    picture.alt = f"{title}. {note}. {ends}."
    return picture


def fit(alpha: float, beta: float, sizes: Sequence[int], times: Repeats,
        held_out: tuple[Sequence[int], Repeats] | None = None, *, title: str = "One message",
        virtual: bool = False) -> Picture:
    """Times of messages against their size, and the line α + nβ fitted to them.

    sizes: bytes, more than 0. times: seconds, one or several repeats a size; the dot is their
    median, the bar holds their middle half, the line all. held_out: sizes and times the fit has
    not seen; the subtitle says how far off the line is there. Raises `ConfigError` if the lengths
    differ, or a size or time is not above 0.
    """
    seen, unseen = _repeats(sizes, times), _repeats(*held_out) if held_out else {}
    if not seen:
        raise ConfigError("fit needs at least one measured size")
    least, most = min([*seen, *unseen]), max([*seen, *unseen])
    heading = f"{title}: time against size ({clock_name(virtual)})"
    found = f"fitted: {machine_text(alpha, beta)}"
    if unseen:
        off = [abs(alpha + n * beta - np.median(t)) / np.median(t) for n, t in unseen.items()]
        found += f" · off by {np.median(off):.0%} (median) at held-out sizes"
    grid = np.geomspace(least / 2, most * 2, 200)
    series = [
        Series("α + nβ", grid.tolist(), (alpha + beta * grid).tolist(), LineStyle(INK, "-", "")),
        Series("α alone", grid.tolist(), [alpha] * len(grid), DOTTED),
        Series("nβ alone", grid.tolist(), (beta * grid).tolist(), DASHED),
        Series("measured, fitted to", list(seen), list(seen.values()),
               LineStyle(HUES[0], "none", "o")),
        Series("measured, held out", list(unseen), list(unseen.values()),
               LineStyle(HUES[3], "none", "s"), PAPER)]
    everything = np.concatenate([*seen.values(), *unseen.values()])
    with lines(series, heading, found, SIZE._replace(label="size of the message (bytes)"), TIME,
               ABOVE | {"bbox_to_anchor": (-0.07, 1.0), "ncols": 5, "handlelength": 2},
               height_in=6.3, top_in=1.35) as (picture, axes):
        axes.set_xlim(least / 2, most * 2)
        axes.set_ylim(min(everything.min(), alpha or np.inf) / 2, everything.max() * 2)
        _mark_half(axes, alpha / beta if beta > 0 else np.inf)
    picture.alt = (f"{heading}. {found}. {count_text(len(seen), 'size')} fitted, "
                   f"{len(unseen)} held out, {bytes_text(least)} to {bytes_text(most)}.")
    return picture


def _repeats(sizes: Sequence[int], times: Repeats) -> dict[int, list[float]]:
    if len(sizes) != len(times):
        raise ConfigError(f"{len(sizes)} sizes but {len(times)} times; give one entry for each")
    found = {n: np.atleast_1d(np.asarray(t, float)).tolist()
             for n, t in zip(sizes, times, strict=True)}
    for n, seconds in found.items():
        check_positive("a size", n)
        check_positive(f"the least time of {n} bytes", min(seconds, default=0))
    return found


def _mark_half(axes: Axes, half: float) -> None:
    """Mark the size at which latency and bandwidth cost the same: n = α/β."""
    low, high = axes.get_xlim()
    if not low < half < high:
        return
    axes.axvline(half, color=QUIET, lw=1.5, ls=(0, (2, 3)), zorder=1)
    left = half > (low * high) ** 0.5  # of the line there is more room, on a logarithmic axis
    axes.annotate(f"n = α/β = {bytes_text(half)}:\nhalf latency, half bandwidth",
                  (half, 0.04), xycoords=("data", "axes fraction"), xytext=(-8 if left else 8, 0),
                  textcoords="offset points", size=12, color=INK, va="bottom",
                  ha="right" if left else "left",
                  bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 2})
