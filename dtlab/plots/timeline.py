"""The timeline: what each rank did, and when, and whom it waited for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch, Rectangle

from dtlab.errors import ConfigError
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
from dtlab.plots.units import bytes_text, count_text, seconds_text, time_unit
from dtlab.trace import Trace

MOST_ARROWS = 300  # more would hide what they show
_LEFT_IN, _RIGHT_IN, _BOTTOM_IN, _TOP_IN = 1.2, 0.35, 1.3, 1.0


class Bar(NamedTuple):
    """One rectangle: `kind` says how it looks, `tint` the rank whose colour it has."""

    rank: int
    kind: str  # "compute" | "reduce" | "send" | "recv" | "wait"
    track: str  # "work" | "send" | "recv": where in the rank's lane
    start_s: float
    end_s: float
    tint: int
    text: str


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
    bars = [bar for bar in _bars(trace) if bar.end_s >= begin and bar.start_s <= end]
    merged = merge_slivers(bars, pixel_s)
    with styled():
        picture = new_picture(width_in, height_in, dpi)
        write_title(picture, f"{title} ({clock_name(trace.virtual)})", _summary(trace))
        axes = place_axes(picture, left=_LEFT_IN, right=_RIGHT_IN, bottom=_BOTTOM_IN, top=_TOP_IN)
        scale = _frame(axes, trace.ranks, begin, end, lanes_in)
        tracks = _tracks(bars)
        _draw_bars(axes, merged, tracks, scale, pixel_s)
        _draw_texts(axes, merged, tracks, scale, pixel_s, lanes_in / trace.ranks)
        note = _draw_arrows(axes, trace, tracks, scale, (begin, end)) if arrows else ""
        _legend(picture, {bar.kind for bar in merged}, note)
        if not bars:
            axes.text(0.5, 0.5, "nothing happened here: no message, no work", color=QUIET,
                      ha="center", va="center", transform=axes.transAxes)
    picture.alt = f"{title}, {clock_name(trace.virtual)}. {_summary(trace)}. {_busiest(trace)}"
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


def _bars(trace: Trace) -> Iterable[Bar]:
    for rank, kind, start_s, end_s, label in trace.spans:
        yield Bar(rank, kind, "work", start_s, end_s, rank, label or kind)
    for m in trace.transfers:
        if m.start_s > m.sent_s:
            yield Bar(m.src, "wait", "send", m.sent_s, m.start_s, m.src, "")
        if m.start_s > m.wanted_s:
            yield Bar(m.dst, "wait", "recv", m.wanted_s, m.start_s, m.src, "")
        yield Bar(m.src, "send", "send", m.start_s, m.end_s, m.src, f"→{m.dst}")
        yield Bar(m.dst, "recv", "recv", m.start_s, m.end_s, m.src, f"←{m.src}")


def merge_slivers(bars: list[Bar], pixel_s: float) -> list[Bar]:
    """Join neighbours in one track that are each under 2 pixels wide and under 1 pixel apart.

    Then a picture has no more bars than it has pixels, however long the trace.
    """
    last: dict[tuple[int, str, str], Bar] = {}
    done: list[Bar] = []
    for bar in sorted(bars, key=lambda b: b.start_s):
        key = bar.rank, bar.track, bar.kind
        before = last.get(key)
        narrow = bar.end_s - bar.start_s < 2 * pixel_s
        if before and narrow and bar.start_s - before.end_s < pixel_s and not before.text:
            last[key] = before._replace(end_s=max(before.end_s, bar.end_s))
            continue
        if before:
            done.append(before)
        last[key] = bar._replace(text="") if narrow else bar
    return done + list(last.values())


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
            axes.axhspan(rank - 0.5, rank + 0.5, color="#f4f6f8", lw=0, zorder=0)
        style = rank_style(rank)
        axes.add_patch(Rectangle(
            (-0.021, rank - 0.42), 0.014, 0.84, facecolor=style.color, hatch=style.hatch,
            edgecolor=style.ink, linewidth=0, transform=axes.get_yaxis_transform(), clip_on=False,
        ))
    return scale


_LOOKS = {  # kind: share of white in its colour, hatch
    "compute": (0.0, ""),
    "reduce": (0.5, "+++"),
    "send": (0.15, ""),
    "recv": (0.6, "..."),
    "wait": (1.0, "////"),
}
_NAMES = {"compute": "compute", "reduce": "reduce", "send": "sending", "recv": "receiving",
          "wait": "waiting"}


def _fill(bar: Bar) -> str:
    return mix(rank_style(bar.tint).color, PAPER, _LOOKS.get(bar.kind, _LOOKS["compute"])[0])


def _draw_bars(
    axes: Axes, bars: list[Bar], tracks: dict[str, tuple[float, float]], scale: float,
    pixel_s: float,
) -> None:
    for kind, (_, hatch) in _LOOKS.items():
        ours = [bar for bar in bars if bar.kind == kind]
        if not ours:
            continue
        corners = []
        for bar in ours:
            low, high = (bar.rank + edge for edge in tracks[bar.track])
            left = bar.start_s / scale
            right = max(bar.end_s, bar.start_s + 1.5 * pixel_s) / scale
            corners.append([(left, low), (right, low), (right, high), (left, high)])
        edge = QUIET if kind == "wait" else INK
        thin = len(ours) > 400
        axes.add_collection(PolyCollection(
            corners, facecolors=[_fill(bar) for bar in ours], edgecolors=edge,
            linewidths=0.2 if thin else 0.8, hatch=hatch, zorder=1.5 if kind == "wait" else 2,
        ), autolim=False)


def _draw_texts(
    axes: Axes, bars: list[Bar], tracks: dict[str, tuple[float, float]], scale: float,
    pixel_s: float, lane_in: float,
) -> None:
    dpi = axes.get_figure().get_dpi()  # type: ignore[union-attr]
    for bar in bars:
        if not bar.text:
            continue
        low, high = tracks[bar.track]
        size = min(13.0, (high - low) * lane_in * 72 * 0.78)
        room_px = (bar.end_s - bar.start_s) / pixel_s - 6
        if size < 7 or len(bar.text) * size * 0.64 * dpi / 72 > room_px:
            continue
        axes.text(
            (bar.start_s + bar.end_s) / 2 / scale, bar.rank + (low + high) / 2, bar.text,
            ha="center", va="center_baseline", size=size, color=ink_on(_fill(bar)), zorder=5,
            clip_on=True,
            bbox={"boxstyle": "square,pad=0.08", "facecolor": _fill(bar), "edgecolor": "none"}
            if _LOOKS.get(bar.kind, ("", ""))[1] else None,
        )


def _draw_arrows(
    axes: Axes, trace: Trace, tracks: dict[str, tuple[float, float]], scale: float,
    window: tuple[float, float],
) -> str:
    """One arrow a message, from when it left to when it had arrived. Returns a note if thinned."""
    begin, end = window
    seen = [m for m in trace.transfers if m.end_s >= begin and m.start_s <= end]
    if not seen:
        return ""
    every = -(-len(seen) // MOST_ARROWS)
    shown = seen[::every]
    down = [m.dst > m.src for m in shown]
    # From the sender's bar to the receiver's, by the nearer edges.
    tail = np.array([[m.start_s / scale, m.src + tracks["send"][1 if d else 0]]
                     for m, d in zip(shown, down, strict=True)])
    head = np.array([[m.end_s / scale, m.dst + tracks["recv"][0 if d else 1]]
                     for m, d in zip(shown, down, strict=True)])
    step = head - tail
    few = len(shown) <= 60
    axes.quiver(
        *tail.T, *step.T, angles="xy", scale_units="xy", scale=1, units="inches",
        width=0.026 if few else 0.012, headwidth=4.5, headlength=6, headaxislength=5.5,
        color=[mix(rank_style(m.src).color, "black", 0.25) for m in shown],
        edgecolor=PAPER, linewidth=0.6 if few else 0, alpha=0.95 if few else 0.6, zorder=4,
        minlength=0,
    )
    return "" if every == 1 else f"arrows: {len(shown):,} of {len(seen):,} messages"


def _legend(picture: Picture, kinds: set[str], note: str) -> None:
    width, _ = picture.get_size_inches()
    handles = [
        Patch(facecolor=mix(QUIET, PAPER, white), hatch=hatch, edgecolor=INK,
              label=_NAMES[kind])
        for kind, (white, hatch) in _LOOKS.items() if kind in kinds
    ]
    if handles:
        picture.legend(handles=handles, loc="lower left", ncols=len(handles), borderaxespad=0,
                       bbox_to_anchor=(MARGIN_IN / width, 0.02), handleheight=1.1,
                       handlelength=2.2, columnspacing=1.6)
    picture.text(1 - MARGIN_IN / width, 0.035, note, ha="right", va="bottom", size=12, color=QUIET)


def _summary(trace: Trace) -> str:
    ends = [m.end_s for m in trace.transfers] + [s.end_s for s in trace.spans]
    parts = [count_text(trace.ranks, "rank"), count_text(len(trace.transfers), "message"),
             f"{bytes_text(trace.sent_bytes())} sent", seconds_text(max(ends, default=0.0))]
    return " · ".join(parts)


def _busiest(trace: Trace) -> str:
    """For the text alternative: how much of its time each rank waited, the longest wait first."""
    waited = dict.fromkeys(range(trace.ranks), 0.0)
    for m in trace.transfers:
        waited[m.src] += max(0.0, m.start_s - m.sent_s)
        waited[m.dst] += max(0.0, m.start_s - m.wanted_s)
    worst = sorted(waited, key=lambda r: -waited[r])[:3]
    told = ", ".join(f"rank {r} {seconds_text(waited[r])}" for r in worst if waited[r] > 0)
    return f"Waited longest: {told}." if told else "Nobody waited."
