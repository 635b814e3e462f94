"""The timeline: what each rank did, and when, and whom it waited for."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path

from dtlab.errors import ConfigError
from dtlab.plots.bars import Bar, bars_of, merge_slivers
from dtlab.plots.palette import FAINT, INK, PAPER, QUIET, ink_on, mix, rank_style
from dtlab.plots.picture import (
    MARGIN_IN,
    Picture,
    clock_name,
    new_picture,
    place_axes,
    styled,
    write_title,
)
from dtlab.plots.texts import write_many
from dtlab.plots.units import bytes_text, count_text, seconds_text, time_unit
from dtlab.trace import Message, Trace

MOST_ARROWS = 300  # more would hide what they show
_LEFT_IN, _RIGHT_IN, _BOTTOM_IN, _TOP_IN = 1.35, 0.35, 1.3, 1.0


def timeline(
    trace: Trace,
    title: str = "Timeline",
    *,
    window: tuple[float, float] | None = None,
    arrows: bool = True,
    width_in: float = 11.0,
    dpi: float = 100,
) -> Picture:
    """Ranks × time: work, messages from both ends, waiting (hatched), arrows between ranks.

    In each rank's lane, from the top: what it sends, its work, what it receives. A message wears
    its sender's colour at both ends. window: the seconds to show (None: all of the run). Thousands
    of messages are thinned, and the picture says so. Raises `ConfigError` for an empty window.
    """
    begin, end = _window(trace, window)
    lanes_in = max(1.1, min(0.62 * trace.ranks, 8.5))
    height_in = lanes_in + _TOP_IN + _BOTTOM_IN
    pixel_s = (end - begin) / ((width_in - _LEFT_IN - _RIGHT_IN) * dpi)
    seen = [bar for bar in bars_of(trace) if bar.end_s >= begin and bar.start_s <= end]
    bars, tracks = merge_slivers(seen, pixel_s), _tracks(seen)
    shown, moved = _arrows_shown(trace, begin, end) if arrows else ([], 0)
    thinned = f" · arrows: {len(shown):,} of {moved:,} messages" if len(shown) < moved else ""
    with styled():
        picture = new_picture(width_in, height_in, dpi)
        heading = f"{title} ({clock_name(trace.virtual)})"
        write_title(picture, heading, _summary(trace) + thinned)
        axes = place_axes(picture, left=_LEFT_IN, right=_RIGHT_IN, bottom=_BOTTOM_IN, top=_TOP_IN)
        scale = _frame(axes, trace.ranks, begin, end, lanes_in)
        _draw_bars(axes, bars, tracks, scale, pixel_s)
        _draw_arrows(axes, shown, tracks, scale)
        told = {"compute", "reduce", "send"} | (set() if len(shown) == moved > 0 else {"recv"})
        _draw_texts(axes, bars, tracks, pixel_s, lanes_in / trace.ranks, (begin, end), told)
        _legend(picture, {bar.kind for bar in bars}, hatched_kinds(bars))
        if not seen:
            axes.text(0.5, 0.5, "nothing happened here: no message, no work", color=QUIET,
                      ha="center", va="center", transform=axes.transAxes)
    part = f" Shown: {seconds_text(begin)} to {seconds_text(end)}." if window else ""
    picture.alt = f"{heading}: {_summary(trace)}. {_waits(trace)}{part}"
    return picture


def _window(trace: Trace, window: tuple[float, float] | None) -> tuple[float, float]:
    if window is not None:
        begin, end = window
        if not begin < end:
            raise ConfigError(f"window must run from an earlier to a later time, not {window}")
        return begin, end
    ends = [m.end_s for m in trace.transfers] + [s.end_s for s in trace.spans]
    latest = max(ends, default=0.0)
    return 0.0, latest * 1.01 if latest > 0 else 1.0


def _tracks(bars: list[Bar]) -> dict[str, tuple[float, float]]:
    """Top and bottom of each track, as shares of a lane of height 1 that is centred on the rank."""
    present = [track for track in ("send", "work", "recv") if any(b.track == track for b in bars)]
    height = 0.84 / max(1, len(present))
    return {t: (-0.42 + i * height, -0.42 + (i + 1) * height) for i, t in enumerate(present)}


def _frame(axes: Axes, ranks: int, begin: float, end: float, lanes_in: float) -> float:
    """Axes, lanes and rank labels. Returns the seconds in one unit of the x axis."""
    scale, unit = time_unit(max(abs(begin), abs(end)))
    axes.set_xlim(begin / scale, end / scale)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_xlabel(f"time ({unit})")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=FAINT)
    room_pt = lanes_in / ranks * 72
    every = 1
    while room_pt * every < 15:
        every *= 2
    axes.set_yticks(range(0, ranks, every), [f"rank {r}" for r in range(0, ranks, every)])
    axes.tick_params(axis="y", pad=24)
    for rank in range(ranks):
        if rank % 2 == 0:
            axes.add_artist(Rectangle(
                (0, rank - 0.5), 1, 1, facecolor="#f4f6f8", linewidth=0, zorder=0,
                transform=axes.get_yaxis_transform(),
            ))
        style = rank_style(rank)
        axes.add_artist(Rectangle(
            (-0.021, rank - 0.42), 0.014, 0.84, facecolor=style.color, hatch=style.hatch,
            edgecolor=style.ink, linewidth=0, transform=axes.get_yaxis_transform(), clip_on=False,
        ))
    return scale


_LOOKS = {  # kind: how much white is in its colour, hatch, name in the legend
    "send": (0.0, "", "sending (top)"),
    "compute": (0.0, "", "compute (middle)"),
    "reduce": (0.5, "+++", "reduce (middle)"),
    "recv": (0.6, "...", "receiving (bottom)"),
    "wait": (0.95, "////", "waiting"),
}
_MOST_HATCHED = 1500  # bars of one kind; in a fuller picture only waiting is hatched


def _fill(bar: Bar) -> str:
    color = QUIET if bar.kind == "wait" else rank_style(bar.tint).color
    return mix(color, PAPER, _LOOKS.get(bar.kind, _LOOKS["compute"])[0])


def hatched_kinds(bars: list[Bar]) -> set[str]:
    """The kinds of bar that are hatched: all that have a hatch, if they are not too many."""
    count = Counter(bar.kind for bar in bars)
    return {kind for kind, (_, hatch, _) in _LOOKS.items()
            if hatch and (kind == "wait" or count[kind] <= _MOST_HATCHED)}


def _edges(bar: Bar, tracks: dict[str, tuple[float, float]]) -> tuple[float, float]:
    """Top and bottom of a bar on the y axis."""
    top, bottom = tracks[bar.track]
    share = (bottom - top) / bar.slots
    return bar.rank + top + bar.slot * share, bar.rank + top + (bar.slot + 1) * share


def _draw_bars(
    axes: Axes, bars: list[Bar], tracks: dict[str, tuple[float, float]], scale: float,
    pixel_s: float,
) -> None:
    hatched = hatched_kinds(bars)
    alike: dict[tuple[str, str], list[Bar]] = {}
    for bar in bars:
        alike.setdefault((bar.kind, _fill(bar)), []).append(bar)
    for (kind, fill), ours in alike.items():
        top, bottom = np.array([_edges(bar, tracks) for bar in ours]).T
        left = np.array([bar.start_s for bar in ours]) / scale
        right = np.array([max(bar.end_s, bar.start_s + 1.5 * pixel_s) for bar in ours]) / scale
        x, y = [left, right, right, left, left], [top, top, bottom, bottom, top]
        outlines = np.stack([np.stack(x, 1), np.stack(y, 1)], 2).reshape(-1, 2)
        codes = np.tile([Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY], len(ours))
        edge, depth = (QUIET, 1.5) if kind == "wait" else (INK, 2.0)
        # One path for all that look alike: drawn, and hatched, many times faster than one by one.
        together = Path(outlines, codes)
        axes.add_artist(PathPatch(together, facecolor=fill, edgecolor=edge, zorder=depth,
                                  linewidth=0.2 if len(bars) > 2000 else 0.8))
        if kind in hatched:
            axes.add_artist(PathPatch(together, facecolor="none", edgecolor=QUIET, linewidth=0,
                                      hatch=_LOOKS[kind][1], zorder=depth + 0.1))


def _draw_texts(
    axes: Axes, bars: list[Bar], tracks: dict[str, tuple[float, float]], pixel_s: float,
    lane_in: float, window: tuple[float, float], kinds: set[str],
) -> None:
    """What a bar is, inside it, where there is room. Peers are named everywhere or nowhere."""
    picture = axes.get_figure()
    assert isinstance(picture, Picture)
    dpi, top_in = picture.get_dpi(), picture.get_figheight() - _TOP_IN
    if lane_in * 0.84 * 72 < 9:
        return  # not even a whole lane is high enough for letters
    longest = {kind: max((len(b.text) for b in bars if b.kind == kind), default=0)
               for kind in ("send", "recv")}
    looks: dict[tuple[str, float], list[tuple[str, float, float]]] = {}
    for bar in bars:
        if not bar.text or bar.kind not in kinds:
            continue
        top, bottom = _edges(bar, tracks)
        size = min(13.0, round((bottom - top) * lane_in * 72 * 0.78, 1))
        letters = longest.get(bar.kind, len(bar.text))
        start_s, end_s = max(bar.start_s, window[0]), min(bar.end_s, window[1])
        room_px = (end_s - start_s) / pixel_s - 6
        if size < 7 or letters * size * 0.64 * dpi / 72 > room_px:
            continue
        x = _LEFT_IN + ((start_s + end_s) / 2 - window[0]) / pixel_s / dpi
        y = top_in - ((top + bottom) / 2 + 0.5) * lane_in
        looks.setdefault((_fill(bar), size), []).append((bar.text, x, y))
    for (fill, size), texts in looks.items():
        write_many(axes, texts, size=size, color=ink_on(fill), halo=fill,
                   transform=picture.dpi_scale_trans)


def _arrows_shown(trace: Trace, begin: float, end: float) -> tuple[list[Message], int]:
    """The messages to draw an arrow for, and how many there are in all."""
    seen = [m for m in trace.transfers if m.end_s >= begin and m.start_s <= end]
    every = -(-len(seen) // MOST_ARROWS)
    while every > 1 and math.gcd(every, trace.ranks) > 1:
        every += 1  # else the same few ranks would be left out every time
    return seen[::max(1, every)], len(seen)


def _draw_arrows(
    axes: Axes, shown: list[Message], tracks: dict[str, tuple[float, float]], scale: float
) -> None:
    """One arrow a message: from when it left to when it had arrived, by the nearer edges."""
    if not shown:
        return
    down = [m.dst > m.src for m in shown]
    tail = np.array([[m.start_s / scale, m.src + tracks["send"][1 if d else 0]]
                     for m, d in zip(shown, down, strict=True)])
    head = np.array([[m.end_s / scale, m.dst + tracks["recv"][0 if d else 1]]
                     for m, d in zip(shown, down, strict=True)])
    few = len(shown) <= 60
    axes.quiver(
        *tail.T, *(head - tail).T, angles="xy", scale_units="xy", scale=1, units="inches",
        width=0.026 if few else 0.016 if len(shown) <= 150 else 0.012,
        headwidth=4.5, headlength=6, headaxislength=5.5,
        color=[mix(rank_style(m.src).color, "black", 0.25) for m in shown],
        edgecolor=PAPER, linewidth=0.6 if few else 0, alpha=0.95 if few else 0.6, zorder=4,
        minlength=0,
    )


def _legend(picture: Picture, kinds: set[str], hatched: set[str]) -> None:
    width, _ = picture.get_size_inches()
    handles = [
        Patch(facecolor=mix(QUIET, PAPER, white), hatch=hatch if kind in hatched else "",
              edgecolor=INK, label=name)
        for kind, (white, hatch, name) in _LOOKS.items() if kind in kinds
    ]
    if handles:
        picture.legend(handles=handles, loc="lower left", ncols=len(handles), borderaxespad=0,
                       bbox_to_anchor=(MARGIN_IN / width, 0.02), handleheight=1.1,
                       handlelength=1.8, columnspacing=1.4, handletextpad=0.5)


def _summary(trace: Trace) -> str:
    ends = [m.end_s for m in trace.transfers] + [s.end_s for s in trace.spans]
    parts = [count_text(trace.ranks, "rank"), count_text(len(trace.transfers), "message"),
             f"{bytes_text(trace.sent_bytes())} sent", seconds_text(max(ends, default=0.0))]
    return " · ".join(parts)


def _waits(trace: Trace) -> str:
    """For the text alternative: where messages waited longest for their other side."""
    waited = dict.fromkeys(range(trace.ranks), 0.0)
    for m in trace.transfers:
        waited[m.src] += max(0.0, m.start_s - m.sent_s)
        waited[m.dst] += max(0.0, m.start_s - m.wanted_s)
    worst = sorted(waited, key=lambda r: -waited[r])[:3]
    told = ", ".join(f"rank {r} {seconds_text(waited[r])}" for r in worst if waited[r] > 0)
    return f"Waited longest for a partner: {told}." if told else "Nobody waited for a partner."
