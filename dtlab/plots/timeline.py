"""The timeline: what each rank, and each of its streams, did when, and for whom it waited."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from dtlab.checks import check_positive
from dtlab.errors import ConfigError
from dtlab.plots.bars import Bar, bars_of, end_of, merge_slivers
from dtlab.plots.palette import FAINT, INK, PAPER, QUIET, ink_on, mix, rank_style
from dtlab.plots.picture import DPI, Picture, clock_name, page
from dtlab.plots.shapes import corners, draw_arrows, draw_boxes, write_many
from dtlab.trace import Message, Trace, check_is_trace
from dtlab.units import bytes_text, count_text, seconds_text, time_unit

MOST_ARROWS = 300  # more would hide what they show
_LEFT_IN, _RIGHT_IN, _BOTTOM_IN, _TOP_IN = 1.6, 0.35, 1.4, 1.0
TRACKS = ("send", "work", "recv")  # from the top of a lane
Lanes = dict[tuple[int, int], int]  # (rank, stream): its place, counted from the top


def timeline(trace: Trace, title: str = "Timeline", *, window: tuple[float, float] | None = None,
             ranks: Sequence[int] | None = None, arrows: bool = True, width_in: float = 11.0
             ) -> Picture:
    """Ranks × time: work, waits and messages from both ends (hatched), arrows between ranks.

    A rank has a lane, and one more for each of its streams. In each lane, from the top: what it
    sends, its work and its waits, what it receives. A message has its sender's colour at both ends.
    window: the seconds to show (None: all of the run). ranks: those to show (None: all). Thousands
    of messages are thinned, and the picture says so. Raises `ConfigError` for an empty window, and
    for ranks that don't exist.
    """
    check_is_trace(trace)
    check_positive("width_in", width_in)
    begin, end = (0.0, end_of(trace) * 1.01 or 1.0) if window is None else window
    if not begin < end:
        raise ConfigError(f"window must run from an earlier to a later time, not {window}")
    wanted = wanted_ranks(trace, ranks)
    bars = [bar for bar in bars_of(trace) if bar.rank in wanted]
    lanes = lanes_of(wanted, bars)
    lanes_in = max(1.1, min(0.62 * len(lanes), 8.5))
    height_in = lanes_in + _TOP_IN + _BOTTOM_IN
    pixel_s = (end - begin) / ((width_in - _LEFT_IN - _RIGHT_IN) * DPI)
    seen = [bar for bar in bars if bar.end_s >= begin and bar.start_s <= end]
    bars, tracks = merge_slivers(seen, pixel_s), _tracks(seen)
    shown, moved = arrows_shown(trace, wanted, begin, end) if arrows else ([], 0)
    thinned = f" · arrows: {len(shown):,} of {moved:,} messages" if len(shown) < moved else ""
    heading = f"{title} ({clock_name(trace.virtual)})"
    summary = summary_of(trace, len(lanes), len(wanted))
    with page(width_in, height_in, heading, summary + thinned) as picture:
        axes = picture.place(left=_LEFT_IN, right=_RIGHT_IN, bottom=_BOTTOM_IN, top=_TOP_IN)
        scale = _frame(axes, lanes, begin, end, lanes_in)
        _draw_bars(axes, bars, lanes, tracks, scale, pixel_s)
        _draw_arrows(axes, shown, lanes, tracks, scale)
        named = {"compute", "reduce", "send"} | (set() if len(shown) == moved > 0 else {"recv"})
        _draw_texts(axes, [bar for bar in bars if bar.kind in named], lanes, tracks, scale,
                    pixel_s, lanes_in / len(lanes), (begin, end))
        _legend(picture, {bar.kind for bar in bars}, hatched_kinds(bars))
        if not seen:
            axes.text(0.5, 0.5, "nothing happened here: no message, no work", color=QUIET,
                      ha="center", va="center", transform=axes.transAxes)
    part = f" Shown: {seconds_text(begin)} to {seconds_text(end)}." if window else ""
    picture.alt = f"{heading}: {summary}. {_waits(trace, wanted)}{part}"
    return picture


def wanted_ranks(trace: Trace, ranks: Sequence[int] | None) -> set[int]:
    wanted = set(range(trace.ranks) if ranks is None else ranks)
    if not wanted or not wanted <= set(range(trace.ranks)):
        raise ConfigError(f"ranks must be some of 0 to {trace.ranks - 1}, not {ranks}")
    return wanted


def lanes_of(ranks: set[int], bars: list[Bar]) -> Lanes:
    """Every rank, and below it its streams that did something."""
    present = {(rank, 0) for rank in ranks} | {(bar.rank, bar.stream) for bar in bars}
    return {lane: place for place, lane in enumerate(sorted(present))}


def lane_name(rank: int, stream: int) -> str:
    return f"{rank} · stream {stream}" if stream else f"rank {rank}"


def tracks_in(bars: list[Bar]) -> list[str]:
    """The tracks that hold any of `bars`, from the top of a lane."""
    return [track for track in TRACKS if any(bar.track == track for bar in bars)]


def _tracks(bars: list[Bar]) -> dict[str, tuple[float, float]]:
    """Top and bottom of each track, as shares of a lane of height 1, from the lane's middle."""
    present = tracks_in(bars)
    height = 0.84 / max(1, len(present))
    return {t: (-0.42 + i * height, -0.42 + (i + 1) * height) for i, t in enumerate(present)}


def _frame(axes: Axes, lanes: Lanes, begin: float, end: float, lanes_in: float) -> float:
    """Axes, lanes and their labels. Returns the seconds in one unit of the x axis."""
    scale, unit = time_unit(max(abs(begin), abs(end)))
    axes.set_xlim(begin / scale, end / scale)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlabel(f"time ({unit})")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=FAINT)
    lane_pt = lanes_in / len(lanes) * 72
    named = [lane for lane in lanes if lane_pt >= 15 or not lane[1]]
    every = 1
    while lanes_in / len(named) * 72 * every < 15:
        every *= 2
    axes.set_yticks([lanes[lane] for lane in named[::every]],
                    [lane_name(*lane) for lane in named[::every]])
    axes.tick_params(axis="y", pad=24)
    for (rank, _), place in lanes.items():
        if rank % 2 == 0:
            axes.add_artist(Rectangle((0, place - 0.5), 1, 1, facecolor="#f4f6f8", linewidth=0,
                                      zorder=0, transform=axes.get_yaxis_transform()))
        style = rank_style(rank)
        axes.add_artist(Rectangle((-0.021, place - 0.42), 0.014, 0.84, facecolor=style.color,
                                  hatch=style.hatch, edgecolor=style.ink, linewidth=0,
                                  transform=axes.get_yaxis_transform(), clip_on=False))
    return scale


STYLES = {  # kind: how much white is in its colour, hatch, name in the legend
    "send": (0.0, "", "sending (top)"),
    "compute": (0.0, "", "compute (middle)"),
    "reduce": (0.5, "+++", "reduce (middle)"),
    "wait": (0.97, "\\", "waiting (middle)"),
    "recv": (0.6, "...", "receiving (bottom)"),
    "posted": (0.95, "////", "posted, unmatched"),
}
_QUIET_KINDS = {"wait", "posted"}
_MOST_HATCHED = 1500  # bars of one kind; in a fuller picture only waits are hatched


def _fill(bar: Bar) -> str:
    color = QUIET if bar.kind in _QUIET_KINDS else rank_style(bar.tint).color
    return mix(color, PAPER, STYLES.get(bar.kind, STYLES["compute"])[0])


def hatched_kinds(bars: list[Bar]) -> set[str]:
    """The kinds of bar that are hatched: all that have a hatch, if they are not too many."""
    count = Counter(bar.kind for bar in bars)
    return {kind for kind, (_, hatch, _) in STYLES.items()
            if hatch and (kind in _QUIET_KINDS or count[kind] <= _MOST_HATCHED)}


def _edges(bar: Bar, lanes: Lanes, tracks: dict[str, tuple[float, float]]) -> tuple[float, float]:
    """Top and bottom of a bar on the y axis."""
    top, bottom = tracks[bar.track]
    share = (bottom - top) / bar.slots
    upper = lanes[bar.rank, bar.stream] + top + bar.slot * share
    return upper, upper + share


def _draw_bars(axes: Axes, bars: list[Bar], lanes: Lanes, tracks: dict[str, tuple[float, float]],
               scale: float, pixel_s: float) -> None:
    hatched = hatched_kinds(bars)
    alike: dict[tuple[str, str], list[Bar]] = {}
    for bar in bars:
        alike.setdefault((bar.kind, _fill(bar)), []).append(bar)
    for (kind, fill), ours in alike.items():
        boxes = []
        for bar in ours:
            top, bottom = _edges(bar, lanes, tracks)
            left, right = bar.start_s, max(bar.end_s, bar.start_s + 1.5 * pixel_s)
            boxes.append(corners(left / scale, top, (right - left) / scale, bottom - top))
        edge, depth = (QUIET, 1.5) if kind in _QUIET_KINDS else (INK, 2.0)
        draw_boxes(axes, boxes, facecolor=fill, edgecolor=edge, zorder=depth,
                   linewidth=0.2 if len(bars) > 2000 else 0.8)
        if kind in hatched:
            draw_boxes(axes, boxes, STYLES[kind][1], facecolor="none", edgecolor=QUIET,
                       linewidth=0, zorder=depth + 0.1)


def _draw_texts(axes: Axes, bars: list[Bar], lanes: Lanes, tracks: dict[str, tuple[float, float]],
                scale: float, pixel_s: float, lane_in: float, window: tuple[float, float]) -> None:
    """Label each bar inside it, where there is room. Peers are named everywhere or nowhere."""
    if lane_in * 0.84 * 72 < 9:
        return  # not even a whole lane is high enough for letters
    longest = {kind: max((len(b.text) for b in bars if b.kind == kind), default=0)
               for kind in ("send", "recv")}
    styles: dict[tuple[str, float], list[tuple[str, float, float]]] = {}
    for bar in bars:
        if not bar.text:
            continue
        top, bottom = _edges(bar, lanes, tracks)
        size = min(13.0, round((bottom - top) * lane_in * 72 * 0.78, 1))
        letters = longest.get(bar.kind, len(bar.text))
        start_s, end_s = max(bar.start_s, window[0]), min(bar.end_s, window[1])
        room_px = (end_s - start_s) / pixel_s - 6
        if size < 7 or letters * size * 0.64 * DPI / 72 > room_px:
            continue
        styles.setdefault((_fill(bar), size), []).append(
            (bar.text, (start_s + end_s) / 2 / scale, (top + bottom) / 2))
    for (fill, size), texts in styles.items():
        write_many(axes, texts, size=size, color=ink_on(fill), halo=fill)


def arrows_shown(trace: Trace, ranks: set[int], begin: float, end: float
                 ) -> tuple[list[Message], int]:
    """The messages to draw an arrow for, and how many there are in all."""
    seen = [m for m in trace.transfers
            if m.end_s >= begin and m.start_s <= end and {m.src, m.dst} <= ranks]
    every = -(-len(seen) // MOST_ARROWS)
    while every > 1 and math.gcd(every, trace.ranks) > 1:
        every += 1  # else the same few ranks would be left out every time
    return seen[::max(1, every)], len(seen)


def _draw_arrows(axes: Axes, shown: list[Message], lanes: Lanes,
                 tracks: dict[str, tuple[float, float]], scale: float) -> None:
    """Draw an arrow a message: from when it left to when it had arrived, by the nearer edges."""
    ends = [(lanes[m.src, m.src_stream], lanes[m.dst, m.dst_stream]) for m in shown]
    tails = [(m.start_s / scale, src + tracks["send"][src < dst])
             for m, (src, dst) in zip(shown, ends, strict=True)]
    heads = [(m.end_s / scale, dst + tracks["recv"][src > dst])
             for m, (src, dst) in zip(shown, ends, strict=True)]
    few = len(shown) <= 60
    draw_arrows(axes, tails, heads, headwidth=4.5, zorder=4,
                width=0.026 if few else 0.016 if len(shown) <= 150 else 0.012,
                color=[mix(rank_style(m.src).color, "black", 0.25) for m in shown],
                linewidth=0.6 if few else 0, alpha=0.95 if few else 0.6)


def _legend(picture: Picture, kinds: set[str], hatched: set[str]) -> None:
    handles = [Patch(facecolor=mix(QUIET, PAPER, white), hatch=hatch if kind in hatched else "",
                     edgecolor=INK, label=name)
               for kind, (white, hatch, name) in STYLES.items() if kind in kinds]
    if handles:
        columns = len(handles) if len(handles) <= 4 else 3
        picture.explain(handles, columns, handleheight=1.1, handlelength=1.8, columnspacing=1.4,
                        handletextpad=0.5)


def summary_of(trace: Trace, lanes: int, shown: int) -> str:
    """Ranks, streams, messages, bytes and time of a run, in a line."""
    parts = [count_text(trace.ranks, "rank")]
    if lanes > shown:
        parts.append(count_text(lanes - shown, "stream"))
    if trace.transfers:
        parts += [count_text(len(trace.transfers), "message"),
                  f"{bytes_text(trace.sent_bytes())} sent"]
    parts.append(seconds_text(end_of(trace)))
    if shown < trace.ranks:
        parts.append(f"shown: {count_text(shown, 'rank')}")
    return " · ".join(parts)


def _waits(trace: Trace, ranks: set[int]) -> str:
    """Say for the text alternative which of `ranks` waited longest for a message's other side, and
    which did nothing but wait."""
    waits = sorted((posted_s, m.start_s, rank) for m in trace.transfers
                   for rank, posted_s in ((m.src, m.sent_s), (m.dst, m.wanted_s)))
    waited, until = dict.fromkeys(sorted(ranks), 0.0), dict.fromkeys(ranks, 0.0)
    for posted_s, start_s, rank in waits:
        if rank in waited and start_s > until[rank]:  # several waits at once count once
            waited[rank] += start_s - max(posted_s, until[rank])
            until[rank] = start_s
    worst = _longest(waited)
    text = f"Waited longest for a partner: {worst}." if worst else "Nobody waited for a partner."
    if trace.waits and not trace.transfers:
        text = ""  # of the messages nothing is known
    exposed = _longest({rank: trace.exposed_s(rank) for rank in waited} if trace.waits else {})
    return text + (f" Communication exposed: {exposed}." if exposed else "")


def _longest(waited: dict[int, float]) -> str:
    """The three ranks with the longest waits: "rank 2 3 µs, rank 0 1 µs"."""
    worst = sorted(waited, key=lambda rank: -waited[rank])[:3]
    return ", ".join(f"rank {r} {seconds_text(waited[r])}" for r in worst if waited[r] > 0)
