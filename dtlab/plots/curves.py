"""Time against size: what algorithms cost by their closed forms, and which one is fastest where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dtlab import cost
from dtlab.collectives import ALGORITHMS
from dtlab.errors import ConfigError
from dtlab.plots.palette import PAPER, QUIET, ink_on, line_style
from dtlab.plots.picture import Picture, new_picture, place_axes, styled, write_title
from dtlab.plots.spread import draw_spread
from dtlab.plots.units import bytes_text, count_text, seconds_text

Measured = Mapping[str, Mapping[int, Sequence[float]]]  # algorithm → bytes → seconds, repeated
POINTS = 64
SAME = 1e-3  # times that differ by more are different


class Crossover(NamedTuple):
    """From `nbytes` on, `after` is the fastest algorithm; below it was `before`.

    Algorithms that are equally fast, but for rounding, are named together: "flat = binomial".
    """

    nbytes: int
    before: str
    after: str


def cost_curves(
    collective: str,
    algorithms: Sequence[str] | None = None,
    ranks: int = 8,
    alpha: float = 5e-6,
    beta: float = 1e-10,
    gamma: float = 0.0,
    measured: Measured | None = None,
    *,
    sizes: tuple[int, int] = (64, 1 << 30),
    times: tuple[float, float] | None = None,
    dpi: float = 100,
) -> Picture:
    """Predicted time of each algorithm against the vector's size, both axes logarithmic.

    algorithms: names from the registry (None: all that have a closed form). alpha, beta, gamma:
    seconds per message, per byte sent, per byte reduced. measured: dots with their spread, e.g.
    {"ring": {4096: [2e-5, 3e-5]}}. sizes, times: the ends of the axes, in bytes and seconds (None:
    as needed).
    The band on top names the fastest algorithm; a dashed line marks each crossover; the dotted
    curve is what no algorithm can beat. Raises `ConfigError` for unknown names.
    """
    known = [name for name in ALGORITHMS.get(collective, {}) if cost.has_form(collective, name)]
    names = known if algorithms is None else list(algorithms)
    if not names:
        raise ConfigError(f"no algorithm of {collective!r}; there are: {', '.join(ALGORITHMS)}")
    grid = _grid(*sizes)
    curves = {name: np.array([_time_s(collective, name, ranks, n, alpha, beta, gamma)
                              for n in grid]) for name in names}
    turns = crossovers(collective, names, ranks, alpha, beta, gamma, sizes=sizes)
    best = turns[0].before if turns else _stretches(curves)[0][1]
    kind = "predicted and measured" if measured else "predicted"
    title = f"{collective} on {count_text(ranks, 'rank')}: {kind} time"
    with styled():
        picture = new_picture(11, 6.2, dpi)
        write_title(picture, title, machine_text(alpha, beta, gamma))
        labels = {name: name + _bound_text(collective, name, ranks, grid[-1]) for name in names}
        longest = max(11, *map(len, labels.values()))  # there may be a "lower bound"
        axes = place_axes(picture, left=1.25, right=0.9 + 0.096 * longest, bottom=0.85, top=1.55)
        _draw_curves(axes, collective, labels, grid, curves, measured or {})
        _draw_bound(axes, collective, ranks, grid, alpha, beta, gamma)
        axes.set_xlim(grid[0], grid[-1])
        if not any(map(np.any, curves.values())):  # one rank: no curve has a place on log axes
            axes.text(0.5, 0.5, "nothing to do: it takes no time", transform=axes.transAxes,
                      ha="center", color=QUIET)
            times = times or (1e-6, 1e-3)
        logarithmic(axes)
        if times:  # set_ylim(None) would freeze the limits as they are
            axes.set_ylim(times)
        _draw_turns(axes, collective, names, grid, turns, best)
        # Beside the axes: within them, there is no corner that no curve goes through.
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), labelspacing=0.5, handlelength=3,
                    handletextpad=0.6, fontsize=12)
    found = [f"{t.after} overtakes {t.before} at {bytes_text(t.nbytes)}" for t in turns]
    picture.alt = (f"{title}. {machine_text(alpha, beta, gamma)}. Fastest at "
                   f"{bytes_text(grid[0])}: {best}. {'; '.join(found) or 'No crossover'}.")
    return picture


def crossovers(
    collective: str, algorithms: Sequence[str], ranks: int, alpha: float, beta: float,
    gamma: float = 0.0, *, sizes: tuple[int, int] = (64, 1 << 30),
) -> list[Crossover]:
    """The sizes in bytes at which the fastest of `algorithms` changes, smallest first.

    Being less than 0.1 % faster does not count as overtaking: cutting vectors between elements
    makes such differences.
    """

    def time_s(name: str, nbytes: int) -> float:
        return _time_s(collective, name, ranks, nbytes, alpha, beta, gamma)

    grid = _grid(*sizes)
    times = {name: np.array([time_s(name, n) for n in grid]) for name in algorithms}
    found = []
    for (_, before), (index, after) in pairwise(_stretches(times)):
        old, new = before.split(" = ")[0], after.split(" = ")[0]
        while index > 1 and times[new][index - 1] < times[old][index - 1]:
            index -= 1  # here it was faster already, by less than what counts
        low, high = grid[index - 1], grid[index]
        while high - low > max(4, low // 1000):  # to a tenth of a percent, or one element
            middle = (low + high) // 2 // 4 * 4
            low, high = (low, middle) if time_s(new, middle) < time_s(old, middle) else \
                (middle, high)
        found.append(Crossover(high, before, after))
    return found


def _stretches(times: Mapping[str, np.ndarray]) -> list[tuple[int, str]]:
    """(index, names): from that size on they are the fastest, together, until the next stretch."""
    starts: list[tuple[int, str]] = []
    for i, least in enumerate(np.min(list(times.values()), axis=0)):
        if not starts or times[starts[-1][1]][i] > least * (1 + SAME):
            starts.append((i, next(n for n in times if times[n][i] <= least * (1 + SAME))))
    ends = [start for start, _ in starts[1:]] + [None]
    return [(start, " = ".join([leader, *(name for name in times if name != leader and np.allclose(
                times[name][start:end], times[leader][start:end], rtol=SAME, atol=0.0))]))
            for (start, leader), end in zip(starts, ends, strict=True)]


@cost.remembered
def _form(collective: str, name: str, ranks: int, nbytes: int) -> cost.Form:
    """Kept without what each rank sends: that would fill the memory."""
    return cost.form(collective, name, ranks, nbytes)._replace(sent_bytes=[], messages=[])


def _time_s(collective: str, name: str, ranks: int, nbytes: int, alpha: float, beta: float,
            gamma: float) -> float:
    """As `cost.time_s`; the closed form is kept, so that a slider only multiplies."""
    return _form(collective, name, ranks, nbytes).seconds(alpha, beta, gamma)


def _bound_text(collective: str, name: str, ranks: int, nbytes: int) -> str:
    """Said beside a curve: " (at most)" if the closed form is a bound, else nothing."""
    return "" if cost.form(collective, name, ranks, nbytes).exact else " (at most)"


def _grid(smallest: int, largest: int) -> list[int]:
    if not 0 < smallest < largest:
        raise ConfigError(f"sizes must be (smallest, largest) in bytes, not {(smallest, largest)}")
    points = np.geomspace(smallest, largest, POINTS) / 4
    return sorted({int(n) * 4 for n in np.round(points)} - {0})


def place_of(collective: str, name: str, otherwise: int) -> int:
    """An algorithm looks the same in every picture: its place in the registry says how."""
    known = list(ALGORITHMS.get(collective, {}))
    return known.index(name) if name in known else otherwise


def machine_text(alpha: float, beta: float, gamma: float = 0.0) -> str:
    """α, β and γ in words: "α = 5 µs · β = 0.1 ns/B (10 GB/s)"."""
    speed = f"{bytes_text(1 / beta)}/s" if beta > 0 else "∞"
    parts = [f"α = {seconds_text(alpha)}", f"β = {beta * 1e9:.3g} ns/B ({speed})"]
    return " · ".join([*parts, f"γ = {gamma * 1e9:.3g} ns/B"] if gamma else parts)


def logarithmic(axes: Axes, *, x: bool = True, y: bool = True) -> None:
    """Logarithmic axes of bytes (x) and seconds (y), with units at every tick."""
    if x:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(10, numticks=12))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: bytes_text(n)))
        axes.set_xlabel("size of the vector (bytes)")
    if y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, numticks=14))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda t, _: seconds_text(t)))
        axes.set_ylabel("time")
    axes.grid(True, which="major")


def _draw_curves(axes: Axes, collective: str, labels: Mapping[str, str], grid: Sequence[int],
                 curves: Mapping[str, np.ndarray], measured: Measured) -> None:
    named = False  # one entry of the legend is enough: marker and colour are the curve's
    for index, (name, times) in enumerate(curves.items()):
        style = line_style(place_of(collective, name, index))
        seen = np.where(times > 0, times, np.nan)
        axes.plot(grid, seen, color=style.color, linestyle=style.dashes, marker=style.marker,
                  markevery=(4 + 3 * index % 8, 12), zorder=3, label=labels[name])
        dots = measured.get(name, {})
        draw_spread(axes, list(dots), list(dots.values()), color=style.color,
                    marker=style.marker, fill=PAPER, label="" if named else "measured")
        named |= bool(dots)


def _draw_bound(axes: Axes, collective: str, ranks: int, grid: Sequence[int], alpha: float,
                beta: float, gamma: float) -> None:
    try:
        bound = [cost.lower_bound_s(collective, ranks, n, alpha, beta, gamma) for n in grid]
    except ConfigError:  # none is known for this collective
        return
    if max(bound) > 0:
        axes.plot(grid, bound, color=QUIET, linewidth=2, linestyle=":", label="lower bound")


def _draw_turns(
    axes: Axes, collective: str, names: Sequence[str], grid: Sequence[int],
    turns: Sequence[Crossover], first: str,
) -> None:
    """The band of the fastest on top of the axes, and a line at each crossover."""
    edges = [grid[0], *(turn.nbytes for turn in turns), grid[-1]]
    best = [first, *(turn.after for turn in turns)]
    span = np.log(grid[-1] / grid[0])
    room_in = axes.get_position().width * axes.figure.get_figwidth()  # type: ignore[union-attr]
    ends = -9.0
    for low, high, name in zip(edges, edges[1:], best, strict=False):
        leader = name.split(" = ")[0]
        color = line_style(place_of(collective, leader, names.index(leader))).color
        left, right = (np.log(edge / grid[0]) / span for edge in (low, high))
        axes.axvspan(low, high, 1.01, 1.085, color=color, lw=0, clip_on=False)
        labels = [f"fastest: {name}", name, leader]
        fitting = [text for text in labels if (right - left) * room_in > 0.12 * len(text)]
        if fitting:
            axes.text((left + right) / 2, 1.045, fitting[0], transform=axes.transAxes, ha="center",
                      va="center_baseline", size=13, weight="bold", color=ink_on(color))
        if low != grid[0]:
            axes.axvline(low, color=QUIET, linewidth=1.5, linestyle=(0, (4, 3)), zorder=1)
            raised = 0.055 if (left - ends) * room_in < 0.9 else 0.0
            axes.text(left, 1.1 + raised, bytes_text(low), transform=axes.transAxes, ha="center",
                      va="bottom", size=12)
            ends = left if not raised else ends
