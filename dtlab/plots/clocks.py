"""The clock picture: each worker's iterations in virtual time, and who waits for whom."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from dtlab.errors import ConfigError
from dtlab.plots.palette import ALARM, INK, PAPER, QUIET, mix, rank_style
from dtlab.plots.picture import Picture, page
from dtlab.plots.shapes import Corners, corners, draw_arrows, draw_boxes, write_many
from dtlab.recording.clock_run import ClockRun, Iteration
from dtlab.units import count_text

_LEFT_IN, _RIGHT_IN, _BOTTOM_IN, _TOP_IN, _LANE_IN = 1.25, 3.15, 1.25, 1.0, 0.62
_SHORT = 0.015  # of the run: shorter waits have no arrow
_HIGH = 0.3  # half of a bar, in lanes


def clocks(run: ClockRun, at_s: float | None = None) -> Picture:
    """A lane a worker: its gradients (numbered by clock), and hatched where it waits.

    An arrow leads from a wait to the worker whose gradient ended it; at the time `at_s`, from those
    who wait then to everyone they wait for. None: the whole run. Raises `ConfigError` for a time
    outside the run.
    """
    whole, now = at_s is None, run.end_s if at_s is None else at_s
    if not 0 <= now <= run.end_s:
        raise ConfigError(f"at_s must be within the run, 0 to {run.end_s:g} s, not {at_s!r}")
    title, summary = f"Who waits for whom: {run.name} (simulated)", _summary(run, now)
    with page(11, _TOP_IN + _BOTTOM_IN + _LANE_IN * run.workers, title, summary) as picture:
        axes = picture.place(left=_LEFT_IN, right=_RIGHT_IN, bottom=_BOTTOM_IN, top=_TOP_IN)
        axes.set_xlim(0, run.end_s)
        axes.set_ylim(run.workers + 0.5, 0.5)
        axes.set_yticks(run.ranks, [f"worker {w}" for w in run.ranks])
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("virtual time (s)")
        _draw_iterations(axes, run, now)
        _draw_arrows(axes, run, now, whole)
        if not whole:
            axes.axvline(now, color=INK, linewidth=2, zorder=6)
        for worker in run.ranks:
            said, color = _status(run, worker, now, whole)
            axes.text(1.02, worker, said, transform=axes.get_yaxis_transform(), va="center",
                      size=12, color=color)
        _legend(picture, run)
    told = "; ".join(f"worker {w}: {_status(run, w, now, whole)[0]}" for w in run.ranks)
    picture.alt = f"{title}. {summary}. {told}."
    return picture


def _summary(run: ClockRun, now: float) -> str:
    parts = [f"after {now:.2f} s", count_text(run.gradients(now), "gradient"),
             f"{run.waiting_share(now):.0%} of the workers' time waited",
             f"readers at most {count_text(run.most_ahead(now), 'clock')} ahead of the slowest"]
    late = run.late(now)
    return " · ".join([*parts[:2], *([f"{late} too late"] if late else []), *parts[2:]])


def _status(run: ClockRun, worker: int, now: float, whole: bool) -> tuple[str, str]:
    """Return the text beside a lane, and its colour."""
    if whole:
        used, late = run.gradients(now, worker), run.late(now, worker)
        told = f"{used} used, {late} late" if late else count_text(used, "gradient")
        return f"{told}, waited {run.waited_s(now, worker):.1f} s", INK
    said = f"clock {run.clock(worker, now)}"
    current = run.current(worker, now)
    if current is None:
        ended = any(i.done_s <= now for i in run.of[worker])
        return f"{said}, {'at its end' if ended else 'about to begin'}", QUIET
    if current.waited and now < current.read_s:
        names = ", ".join(map(str, run.blockers(current, now)))
        return f"{said}, waits for {names}", ALARM
    return f"{said}, computes", INK


def _draw_iterations(axes: Axes, run: ClockRun, now: float) -> None:
    texts: dict[str, list[tuple[str, float, float]]] = {}
    waits: list[Corners] = []
    width_px = axes.get_window_extent().width
    for worker in run.ranks:
        style = rank_style(worker)
        begun = [i for i in run.of[worker] if i.asked_s < now]
        waits += [_bar(i.asked_s, min(i.read_s, now), worker) for i in begun if i.waited]
        used = [_bar(i.read_s, min(i.done_s, now), worker) for i in begun
                if i.read_s < now and not _is_late(i, now)]
        late = [_bar(i.read_s, i.done_s, worker) for i in begun if _is_late(i, now)]
        for boxes, color, edge in ((used, style.color, INK),
                                   (late, mix(style.color, PAPER, 0.8), ALARM)):
            draw_boxes(axes, boxes, facecolor=color, edgecolor=edge, linewidth=0.8, zorder=2)
        for i in begun:
            seen = (min(i.done_s, now) - i.read_s) / run.end_s * width_px
            if seen > 22:
                gone = _is_late(i, now)
                text = f"✗{i.clock}" if gone and seen > 34 else str(i.clock)
                texts.setdefault(ALARM if gone else style.ink, []).append(
                    (text, (i.read_s + min(i.done_s, now)) / 2, worker))
    draw_boxes(axes, waits, "////", facecolor=PAPER, edgecolor=QUIET, linewidth=0.8, zorder=2)
    for color, found in texts.items():
        write_many(axes, found, size=12, color=color)


def _bar(from_s: float, to_s: float, worker: int) -> Corners:
    return corners(from_s, worker - _HIGH, to_s - from_s, 2 * _HIGH)


def _is_late(iteration: Iteration, now: float) -> bool:
    return iteration.staleness is None and iteration.done_s <= now


def _draw_arrows(axes: Axes, run: ClockRun, now: float, whole: bool) -> None:
    """Draw an arrow from the middle of each wait that is over to the end of the worker it waited
    for; from each that is not, to every worker it still waits for."""
    tails, heads = [], []
    for i in run.iterations:
        if min(i.read_s, now) - i.asked_s < _SHORT * run.end_s:
            continue
        begin = (i.asked_s + min(i.read_s, now)) / 2
        to = [run.releaser(i)] if i.read_s <= now else [] if whole else run.blockers(i, now)
        for other in to:
            if other is not None and other != i.worker:
                down = 1 if other > i.worker else -1
                tails.append((begin, i.worker))
                heads.append((min(i.read_s, now), other - down * _HIGH))
    draw_arrows(axes, tails, heads, width=0.02, headwidth=5, color=INK, linewidth=0.5, zorder=5)


def _legend(picture: Picture, run: ClockRun) -> None:
    shown = [Patch(facecolor=mix(QUIET, PAPER, 0.55), edgecolor=INK, label="a gradient, its clock"),
             Patch(facecolor=PAPER, edgecolor=QUIET, hatch="////", label="waits")]
    if any(i.staleness is None for i in run.iterations):
        shown.append(Patch(facecolor=mix(QUIET, PAPER, 0.8), edgecolor=ALARM,
                           label="✗ too late: not used"))
    picture.explain(shown, 3, handleheight=1.1)
