"""Time against size: what algorithms cost by their closed forms, and which one is fastest where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from dtlab import cost
from dtlab.checks import check_choice
from dtlab.collectives import ALGORITHMS
from dtlab.cost.model import check_rates
from dtlab.errors import ConfigError
from dtlab.plots.lines import BESIDE, DOTTED, SIZE, TIME, Series, lines, style_of
from dtlab.plots.palette import PAPER, QUIET, ink_on
from dtlab.plots.picture import Picture
from dtlab.units import bytes_text, count_text, seconds_text

Measured = Mapping[str, Mapping[int, Sequence[float]]]  # algorithm → bytes → seconds, repeated
POINTS = 64
SAME = 1e-3  # times that differ by more are different


class Crossover(NamedTuple):
    """The size `nbytes` from which on `after` is the fastest algorithm; below it was `before`.

    Algorithms that are equally fast, but for rounding, are named together: "flat = binomial".
    """

    nbytes: int
    before: str
    after: str


def cost_curves(collective: str, algorithms: Sequence[str] | None = None, ranks: int = 8,
                alpha: float = 5e-6, beta: float = 1e-10, gamma: float = 0.0,
                measured: Measured | None = None, *, sizes: tuple[int, int] = (64, 1 << 30),
                times: tuple[float, float] | None = None) -> Picture:
    """Predicted time of each algorithm against the vector's size, both axes logarithmic.

    algorithms: names from the registry (None: all that have a closed form). alpha, beta, gamma:
    seconds per message, per byte sent, per byte reduced. measured: dots with their spread, e.g.
    {"ring": {4096: [2e-5, 3e-5]}}. sizes, times: the ends of the axes, in bytes and seconds (None:
    as needed).
    The band on top names the fastest algorithm; a dashed line marks each crossover; the dotted
    curve is what no algorithm can beat. Raises `ConfigError` for unknown names, and numbers that
    make no sense.
    """
    check_rates(alpha, beta, gamma)
    check_choice("collective", collective, ALGORITHMS)
    known = [name for name in ALGORITHMS[collective] if cost.has_form(collective, name)]
    names = known if algorithms is None else list(algorithms)
    if not names:
        raise ConfigError("algorithms names one or more; None: all")
    grid = _grid(*sizes)
    curves = {name: np.array([_time_s(collective, name, ranks, n, alpha, beta, gamma)
                              for n in grid]) for name in names}
    turns = crossovers(collective, names, ranks, alpha, beta, gamma, sizes=sizes)
    best = turns[0].before if turns else _stretches(curves)[0][1]
    kind = "predicted and measured" if measured else "predicted"
    title = f"{collective} on {count_text(ranks, 'rank')}: {kind} time"
    series = [*_curves(collective, ranks, grid, curves), *_dots(collective, names, measured or {}),
              *_bound(collective, ranks, grid, alpha, beta, gamma)]
    longest = max(11, *(len(each.name) for each in series))
    # Beside the axes: within them, there is no corner that no curve goes through.
    with lines(series, title, machine_text(alpha, beta, gamma), SIZE, TIME,
               BESIDE | {"labelspacing": 0.5, "handletextpad": 0.6, "fontsize": 12},
               height_in=6.2, right_in=0.9 + 0.096 * longest, top_in=1.55) as (picture, axes):
        axes.set_xlim(grid[0], grid[-1])
        if not any(map(np.any, curves.values())):  # one rank: no curve has a place on log axes
            axes.text(0.5, 0.5, "nothing to do: it takes no time", transform=axes.transAxes,
                      ha="center", color=QUIET)
            times = times or (1e-6, 1e-3)
        if times:  # set_ylim(None) would freeze the limits as they are
            axes.set_ylim(times)
        _draw_turns(axes, collective, names, grid, turns, best)
    found = [f"{t.after} overtakes {t.before} at {bytes_text(t.nbytes)}" for t in turns]
    picture.alt = (f"{title}. {machine_text(alpha, beta, gamma)}. Fastest at "
                   f"{bytes_text(grid[0])}: {best}. {'; '.join(found) or 'No crossover'}.")
    return picture


def crossovers(collective: str, algorithms: Sequence[str], ranks: int, alpha: float, beta: float,
               gamma: float = 0.0, *, sizes: tuple[int, int] = (64, 1 << 30)) -> list[Crossover]:
    """The sizes in bytes at which the fastest of `algorithms` changes, smallest first.

    Being less than 0.1 % faster does not count as overtaking: cutting vectors between elements
    makes such differences. Raises `ConfigError` as `cost_curves`.
    """
    check_rates(alpha, beta, gamma)
    if not algorithms:
        raise ConfigError("crossovers needs at least one algorithm")

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
def _closed_form(collective: str, name: str, ranks: int, nbytes: int) -> cost.Form:
    """Return the form, to be kept, without what each rank sends: that would fill the memory."""
    return cost.form(collective, name, ranks, nbytes)._replace(sent_bytes=[], messages=[])


def _time_s(collective: str, name: str, ranks: int, nbytes: int, alpha: float, beta: float,
            gamma: float) -> float:
    """Do as `cost.time_s`, but keep the closed form, so that a slider only multiplies."""
    return _closed_form(collective, name, ranks, nbytes).seconds(alpha, beta, gamma)


def _grid(smallest: int, largest: int) -> list[int]:
    if not 0 < smallest < largest:
        raise ConfigError(f"sizes must be (smallest, largest) in bytes, not {(smallest, largest)}")
    points = np.geomspace(smallest, largest, POINTS) / 4
    return sorted({int(n) * 4 for n in np.round(points)} - {0})


def machine_text(alpha: float, beta: float, gamma: float = 0.0) -> str:
    """α, β and γ in words: "α = 5 µs · β = 0.1 ns/B (10 GB/s)"."""
    speed = f"{bytes_text(1 / beta)}/s" if beta > 0 else "∞"
    parts = [f"α = {seconds_text(alpha)}", f"β = {seconds_text(beta)}/B ({speed})"]
    return " · ".join([*parts, f"γ = {seconds_text(gamma)}/B"] if gamma else parts)


def _curves(collective: str, ranks: int, grid: Sequence[int], curves: Mapping[str, np.ndarray]
            ) -> list[Series]:
    exact = [cost.form(collective, name, ranks, grid[-1]).exact for name in curves]
    return [Series(name if exact[index] else f"{name} (at most)", grid,
                   np.where(times > 0, times, np.nan).tolist(), style_of(collective, name, index),
                   every=(4 + 3 * index % 8, 12))
            for index, (name, times) in enumerate(curves.items())]


def _dots(collective: str, names: Sequence[str], measured: Measured) -> list[Series]:
    """One name in the legend is enough: marker and colour are the curve's."""
    shown = [(index, name) for index, name in enumerate(names) if measured.get(name)]
    if not all(times for _, name in shown for times in measured[name].values()):
        raise ConfigError("measured needs a time or more for each size")
    return [Series("" if number else "measured", list(measured[name]),
                   list(measured[name].values()), style_of(collective, name, index), PAPER)
            for number, (index, name) in enumerate(shown)]


def _bound(collective: str, ranks: int, grid: Sequence[int], alpha: float, beta: float,
           gamma: float) -> list[Series]:
    try:
        bound = [cost.lower_bound_s(collective, ranks, n, alpha, beta, gamma) for n in grid]
    except ConfigError:  # none is known for this collective
        return []
    return [Series("lower bound", grid, bound, DOTTED)] if max(bound) > 0 else []


def _draw_turns(axes: Axes, collective: str, names: Sequence[str], grid: Sequence[int],
                turns: Sequence[Crossover], first: str) -> None:
    """Draw the band of the fastest on top of the axes, and a line at each crossover."""
    edges = [grid[0], *(turn.nbytes for turn in turns), grid[-1]]
    best = [first, *(turn.after for turn in turns)]
    span = np.log(grid[-1] / grid[0])
    room_in = axes.get_position().width * axes.figure.get_figwidth()  # type: ignore[union-attr]
    ends = -9.0
    for low, high, name in zip(edges, edges[1:], best, strict=False):
        leader = name.split(" = ")[0]
        color = style_of(collective, leader, names.index(leader)).color
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
