"""A cluster at work: how full each link is at one moment, and some of them over time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.lines import Line2D

from dtlab.checks import check_amount
from dtlab.errors import ConfigError
from dtlab.plots.link_geometry import HIGH_IN, WIDE_IN, Box, geometry_of
from dtlab.plots.network import draw_nodes
from dtlab.plots.palette import FAINT, INK, PAPER, QUIET, line_style
from dtlab.plots.picture import MARGIN_IN, Picture, page
from dtlab.recording.link_history import Link, LinkHistory, Stretch
from dtlab.topology import Topology
from dtlab.trace import Trace
from dtlab.units import bytes_text, count_text, seconds_text, time_unit

FULL = 1 - 1e-6
MOST_SHOWN = 3  # links over time, unless asked for
MOST_LABELS, MOST_PAIRS = 14, 8
_LETTERS = 75  # of the names of all links over time: more don't fit beside each other
_STRIP_IN = 1.25  # height of the loads over time, below the cluster
_HEAD_IN, _FOOT_IN = 0.95, _STRIP_IN + 1.15  # above and below the cluster
WIDTH_IN, HEIGHT_IN = WIDE_IN + 2 * MARGIN_IN, HIGH_IN + _HEAD_IN + _FOOT_IN
_LEFT_IN = 1.1  # of loads over time
_STYLES = (  # up to this load: colour, name in the legend
    (0.0, FAINT, "idle link"),
    (0.5, "#b57cc6", "up to half"),
    (FULL, "#7d2f96", "more than half"),
    (np.inf, "#2e0a3c", "full"),
)


def flows(cluster: Topology, trace: Trace, at_s: float | None = None, *,
          title: str = "") -> Picture:
    """The cluster at virtual time `at_s`, each link as thick and dark as it is loaded, and below it
    the load of the busiest links over the whole run.

    Load is bytes per second over what the link can carry. Each direction of a link is a lane of its
    own, on its right-hand side. at_s None: the first moment at which something moves. Raises
    `ConfigError` unless the trace was simulated on this cluster.
    """
    history = LinkHistory(cluster, trace)
    check_amount("at_s", 0 if at_s is None else at_s)
    if at_s is None:
        at_s = next((s.start_s for s in history.stretches if s.moving), 0.0)
    return draw_flows(history, at_s, title=title)


def draw_flows(history: LinkHistory, at_s: float, *, title: str = "") -> Picture:
    """Draw what `flows` does, of a history that is there already."""
    stretch = history.at(at_s)
    heading = heading_of(history, at_s, title or history.cluster.name.split("(")[0])
    note = note_of(history, stretch)
    with page(WIDTH_IN, HEIGHT_IN, heading, note) as picture:
        _draw_cluster(picture, history, stretch)
        strip = picture.place(left=_LEFT_IN, right=MARGIN_IN, bottom=0.66,
                           top=HEIGHT_IN - _STRIP_IN - 0.66)
        _draw_loads(strip, history, history.busiest[:columns(history.busiest)])
        strip.axvline(at_s / time_unit(history.end_s)[0], color=INK, linewidth=2.5, zorder=5)
        _draw_legend(picture)
    picture.alt = f"{heading}: {note}. {rates_of(stretch)}"
    return picture


def link_loads(cluster: Topology, trace: Trace, links: Sequence[Link] | None = None, *,
               title: str = "Load of links") -> Picture:
    """The load of `links`, each as (from, to), over the time of a simulated run; None: of those
    with most to do. Raises `ConfigError` for links that aren't there."""
    history = LinkHistory(cluster, trace)
    heading, note = f"{title} (simulated)", f"{cluster.name} · {seconds_text(history.end_s)}"
    chosen = history.busiest[:MOST_SHOWN] if links is None else _series(history, links)
    legend_in = 0.27 * -(-len(chosen) // columns(chosen))
    with page(WIDTH_IN, 3.3 + legend_in, heading, note) as picture:
        axes = picture.place(left=_LEFT_IN, right=MARGIN_IN, bottom=0.7,
                          top=1.05 + legend_in)
        _draw_loads(axes, history, chosen)
    spans = [s.end_s - s.start_s for s in history.stretches]
    means = [f"{name} {np.dot(load, spans) / (history.end_s or 1):.0%}" for name, load in chosen]
    picture.alt = f"{heading}: {note}. On average: {', '.join(means) or 'no load'}."
    return picture


def _series(history: LinkHistory, links: Sequence[Link]) -> list[tuple[str, list[float]]]:
    number = {ends: link for link, ends in enumerate(history.links)}
    for link in links:
        if link not in number:
            raise ConfigError(f"there is no link from {link[0]!r} to {link[1]!r} in "
                              f"{history.cluster.name}")
    return [(history.name(link), [s.loads.get(number[link], 0.0) for s in history.stretches])
            for link in links]


def columns(chosen: Sequence[tuple[str, list[float]]]) -> int:
    """Count the names of links that fit beside each other, at most three."""
    return MOST_SHOWN if sum(len(name) for name, _ in chosen[:MOST_SHOWN]) <= _LETTERS else 2


def heading_of(history: LinkHistory, at_s: float, title: str) -> str:
    """The title of a moment."""
    return f"{title}, at {seconds_text(at_s)} of {seconds_text(history.end_s)} (simulated)"


def note_of(history: LinkHistory, stretch: Stretch | None) -> str:
    """Summarize the moving messages, and the full and the failed links, in one line."""
    if stretch is None or not stretch.moving:
        return "no bytes are on the move"
    names = {link: history.name(history.links[link]) for link in stretch.loads}
    full = [names[link] for link, load in stretch.loads.items() if load > FULL]
    down = [name for link, name in names.items() if not stretch.capacity_Bps[link]]
    parts = [f"{count_text(len(stretch.moving), 'message')} on the move"]
    for word, links in (("full", full), ("failed", down)):
        if links:
            more = f" and {len(links) - 3} more" if len(links) > 3 else ""
            parts.append(f"{word}: {', '.join(links[:3])}{more}")
    return " · ".join(parts)


def rates_of(stretch: Stretch | None) -> str:
    """List senders, receivers and speeds of messages; those of one speed together."""
    if stretch is None:
        return ""
    moving = sorted(stretch.moving, key=lambda f: (f.rate_Bps, f.message.src, f.message.dst))
    parts = []
    for rate_Bps, group in groupby(moving, key=lambda f: f"{bytes_text(f.rate_Bps)}/s"):
        pairs = [f"{f.message.src} → {f.message.dst}" for f in group]
        more = f" and {len(pairs) - MOST_PAIRS} more" if len(pairs) > MOST_PAIRS else ""
        parts.append(f"{', '.join(pairs[:MOST_PAIRS])}{more}: {rate_Bps}")
    return "; ".join(parts) + "." if parts else ""


# ---- drawing -----------------------------------------------------------------------------------


def _look(load: float) -> str:
    return next(color for limit, color, _ in _STYLES if load <= limit)


def _width_pt(load: float) -> float:
    return 1.2 + 5.8 * load


def _draw_cluster(picture: Picture, history: LinkHistory, stretch: Stretch | None) -> None:
    """Draw nodes, and a lane for each direction of each link. The axes count inches."""
    axes = picture.place(left=MARGIN_IN, right=MARGIN_IN, bottom=_FOOT_IN, top=_HEAD_IN)
    axes.set_axis_off()
    axes.set_xlim(0, WIDE_IN)
    axes.set_ylim(0, HIGH_IN)
    loads = {} if stretch is None else stretch.loads
    shape = geometry_of(history)
    order = sorted(shape.lanes, key=lambda link: loads.get(link, 0.0))  # the fullest on top
    shares = [loads.get(link, 0.0) for link in order]
    axes.add_collection(LineCollection(
        [shape.lanes[link] for link in order], colors=[_look(share) for share in shares],
        linewidths=[_width_pt(share) * shape.thin for share in shares], zorder=1), autolim=False)
    busy = [(loads[link], shape.lanes[link]) for link in order if loads.get(link, 0.0) > 0]
    _draw_heads(axes, busy, shape.thin)
    for place, text in shares_of(history, stretch):
        axes.text(float(place[0]), float(place[1]), text, ha="center", va="center", size=12,
                  color=INK, zorder=4, bbox={"boxstyle": "round,pad=0.05", "facecolor": PAPER,
                                             "linewidth": 0, "alpha": 0.8})
    draw_nodes(axes, history.graph, shape.places)


def _point(lane: np.ndarray, share: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """The point after `share` of a lane, and its direction there."""
    at = share * (len(lane) - 1)
    step = min(int(at), len(lane) - 2)
    start, end = lane[step], lane[step + 1]
    along = (end - start) / (float(np.hypot(*(end - start))) or 1.0)
    return start + (at - step) * (end - start), along


def _draw_heads(axes: Axes, busy: Sequence[tuple[float, np.ndarray]], thin: float) -> None:
    """Mark the direction of the bytes: a white arrow head in each lane."""
    heads = []
    for load, lane in busy:
        point, along = _point(lane)
        size = (0.05 + 0.05 * load) * thin
        across = np.array([along[1], -along[0]])
        heads.append([point + along * size * 1.5, point - along * size + across * size,
                      point - along * size - across * size])
    axes.add_collection(PolyCollection(
        heads, facecolors=[_look(load) for load, _ in busy], edgecolors=PAPER, linewidths=0.8,
        zorder=1.5), autolim=False)


def shares_of(history: LinkHistory, stretch: Stretch | None) -> list[tuple[np.ndarray, str]]:
    """Return places, in inches, and texts of the shares: beside a lane, where there is room."""
    shape, loads = geometry_of(history), {} if stretch is None else stretch.loads
    busy = sorted(((load, link) for link, load in loads.items()
                   if load > 0 and link in shape.lanes), key=lambda pair: pair[0])
    taken, placed = [*shape.boxes], []
    for load, link in busy if len(busy) <= MOST_LABELS else ():
        text = f"{load * 100:.3g} %"
        half = np.array([0.05 + 0.06 * len(text), 0.12])  # of the text's box, in inches
        for share in (0.5, 0.38, 0.62, 0.26, 0.74):
            point, along = _point(shape.lanes[link], share)
            place = point + np.array([along[1], -along[0]]) * 0.22 + along * 0.12
            box = (*(place - half), *(place + half))
            if not any(_meet(box, other) for other in taken):
                taken.append(box)
                placed.append((place, text))
                break
    return placed


def _meet(one: Box, other: Box) -> bool:
    return (one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3])


def _draw_loads(axes: Axes, history: LinkHistory,
                chosen: Sequence[tuple[str, list[float]]]) -> None:
    """Load against time, a line for each of the chosen links."""
    scale, unit = time_unit(history.end_s)
    edges = [0.0, *(s.end_s / scale for s in history.stretches)]
    for number, (name, loads) in enumerate(chosen):
        style = line_style(number)
        axes.stairs(np.array(loads) * 100, edges, baseline=None, color=style.color,
                    linestyle=style.dashes, linewidth=3.5 - 0.8 * number, label=name, zorder=4)
    axes.set_xlim(0, edges[-1] or 1)
    axes.set_ylim(0, 105)
    axes.set_yticks([0, 50, 100], ["0 %", "50 %", "100 %"])
    axes.set_xlabel(f"time ({unit})", loc="right")
    axes.set_ylabel("load")
    axes.grid(True, axis="both", color=FAINT)
    if chosen:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.2,
                    ncols=columns(chosen), handlelength=2.6, fontsize=12)


def _draw_legend(picture: Picture) -> None:
    handles = [Line2D([], [], color=color, linewidth=_width_pt(min(limit, 1.0)), label=name)
               for limit, color, name in _STYLES]
    picture.explain(handles, 4, fontsize=12, labelcolor=QUIET)
