"""Copies of a server, message by message: who leads, who dies, what is acknowledged."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D

from dtlab.plots.palette import ALARM, FAINT, INK, PAPER, QUIET, rank_color, rank_style
from dtlab.plots.picture import MARGIN_IN, Picture, page
from dtlab.recording.replica_run import COPIES, END_S, FAR, MASTER, NEAR, PushReply, ReplicaRun
from dtlab.trace import Message
from dtlab.units import count_text, seconds_text

WIDTH_IN, HEIGHT_IN = 11.0, 5.9
_ROWS = (NEAR, 0, 1, 2, FAR, MASTER)  # from the top; the link that is cut lies below the second
_HEIGHT = {rank: len(_ROWS) - 1 - row for row, rank in enumerate(_ROWS)}
_CUT_AT = (_HEIGHT[0] + _HEIGHT[1]) / 2
_NAMES = {**{copy: f"copy {copy}" for copy in COPIES}, MASTER: "master", FAR: "worker 4",
          NEAR: "worker 5"}


def replicas(run: ReplicaRun, *, begin_s: float = 0.0, end_s: float = END_S,
             title: str = "") -> Picture:
    """Time goes to the right; each rank is a line, and a message goes from its sender's to its
    receiver's. The thick part of a copy's line: it holds the lease to lead. Round marks on a
    worker's line: a push is acknowledged."""
    name = title or run.name
    heading = f"{name[:1].upper()}{name[1:]}, {_event_text(run)} (simulated)"
    found = summary(run)
    with page(WIDTH_IN, HEIGHT_IN, heading, found) as picture:
        axes = picture.place(left=1.25, right=MARGIN_IN, bottom=1.0, top=0.98)
        _draw_lines(axes, run, end_s)
        _draw_messages(axes, run, begin_s, end_s)
        _draw_cut(axes, run, begin_s, end_s)
        _draw_replies(axes, [each for each in run.replies if begin_s <= each.replied_s <= end_s])
        axes.set_xlim(begin_s * 1e3, end_s * 1e3)
        axes.set_ylim(-0.5, len(_ROWS) - 0.5)
        axes.set_yticks([_HEIGHT[rank] for rank in _ROWS], [_NAMES[rank] for rank in _ROWS])
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("time (ms)", loc="right")
        for side in ("left", "right", "top"):
            axes.spines[side].set_visible(False)
        _draw_legend(picture)
    picture.alt = f"{heading}: {found}. {_story(run)}"
    return picture


def summary(run: ReplicaRun) -> str:
    """Summarize the outcome of the pushes, in one line."""
    lost = f"LOST: {run.lost}" if run.lost else "none lost"
    return (f"{count_text(run.acknowledged, 'push', 'pushes')} acknowledged · {run.refused} refused"
            f" · {run.counted} count in the end · {lost} · "
            f"longest wait {seconds_text(run.longest_s)}")


def _event_text(run: ReplicaRun) -> str:
    if run.died_s < math.inf:
        return f"copy {run.victim} dies"
    if run.cut_s is None:
        return "nothing happens"
    if run.healed_s > END_S:
        return f"copy 0 is cut off at {seconds_text(run.cut_s)}"
    return (f"copy 0 is cut off from {seconds_text(run.cut_s)} to "
            f"{seconds_text(run.healed_s)}")


def _story(run: ReplicaRun) -> str:
    """List the leaders and the copies declared dead, with their times."""
    terms = [f"copy {term.head} leads from {seconds_text(term.from_s)}"
             for term in run.master_log.terms]
    dead = [f"the master gives copy {rank} up at {seconds_text(at_s)}"
            for rank, at_s in run.master_log.dead.items()]
    return "; ".join(terms + dead) + "."


# ---- drawing -----------------------------------------------------------------------------------


def _draw_lines(axes: Axes, run: ReplicaRun, end_s: float) -> None:
    """Draw a line for each rank as long as it lives; thick while it holds the lease."""
    for rank in _ROWS:
        until_s = run.died_s if rank == run.victim else end_s
        axes.plot([0, min(until_s, end_s) * 1e3], [_HEIGHT[rank]] * 2, color=rank_color(rank),
                  linewidth=1.6, zorder=2)
        if until_s < end_s:
            axes.plot(until_s * 1e3, _HEIGHT[rank], marker="X", markersize=15, color=ALARM,
                      markeredgecolor=PAPER, zorder=6)
            axes.text(until_s * 1e3, _HEIGHT[rank] + 0.22, "dies", color=ALARM, size=12,
                      ha="center", va="bottom", zorder=6, bbox=_PLATE)
    for term in run.master_log.terms:
        until_s = min(term.until_s, run.died_s if term.head == run.victim else math.inf, end_s)
        axes.plot([term.from_s * 1e3, until_s * 1e3], [_HEIGHT[term.head]] * 2,
                  color=rank_color(term.head), linewidth=9, solid_capstyle="butt", alpha=0.55,
                  zorder=1.5)
    for rank, at_s in run.master_log.dead.items():
        if at_s < end_s:
            axes.plot(at_s * 1e3, _HEIGHT[MASTER], marker="v", markersize=9, color=INK, zorder=6)
            axes.text(at_s * 1e3, _HEIGHT[MASTER] - 0.2, f"gives up copy {rank}", size=11,
                      color=INK, ha="center", va="top", zorder=6)


_PLATE = {"boxstyle": "round,pad=0.1", "facecolor": PAPER, "linewidth": 0, "alpha": 0.85}


def _draw_messages(axes: Axes, run: ReplicaRun, begin_s: float, end_s: float) -> None:
    """Draw messages from sender's to receiver's line; those to and from the master are faint."""
    shown = [m for m in run.trace.transfers if m.end_s >= begin_s and m.start_s <= end_s]
    for quiet in (True, False):
        some = [m for m in shown if (MASTER in (m.src, m.dst)) == quiet]
        axes.add_collection(LineCollection(
            [_segment(m) for m in some], colors=[FAINT if quiet else rank_color(m.src)
                                                 for m in some],
            linewidths=0.8 if quiet else 1.3, zorder=1 if quiet else 3), autolim=False)
        if not quiet:
            heads = np.array([_segment(m)[1] for m in some]).reshape(-1, 2)
            axes.scatter(heads[:, 0], heads[:, 1], s=9, c=[rank_color(m.src) for m in some],
                         zorder=3.5, linewidths=0)


def _segment(m: Message) -> list[tuple[float, float]]:
    return [(m.start_s * 1e3, _HEIGHT[m.src]), (m.end_s * 1e3, _HEIGHT[m.dst])]


def _draw_cut(axes: Axes, run: ReplicaRun, begin_s: float, end_s: float) -> None:
    if run.cut_s is None:
        return
    span = [max(run.cut_s, begin_s) * 1e3, min(run.healed_s, end_s) * 1e3]
    axes.plot(span, [_CUT_AT] * 2, color=ALARM, linewidth=3, linestyle=(0, (3, 1.5)), zorder=5)
    axes.text(span[0], _CUT_AT, "cut ", color=ALARM, size=12, ha="right", va="center",
              zorder=6, bbox=_PLATE)
    if run.healed_s < end_s:
        axes.text(span[1], _CUT_AT, " healed", color=INK, size=12, ha="left", va="center",
                  zorder=6, bbox=_PLATE)


def _draw_replies(axes: Axes, replies: list[PushReply]) -> None:
    """Draw each reply to a worker, when it came."""
    for yes in (True, False):
        some = [one for one in replies if one.acknowledged == yes]
        axes.scatter([one.replied_s * 1e3 for one in some], [_HEIGHT[one.worker] for one in some],
                     marker="o" if yes else "X", s=46 if yes else 80, zorder=5,
                     c=[rank_style(one.worker).color if yes else ALARM for one in some],
                     edgecolors=PAPER, linewidths=0.8)


def _draw_legend(picture: Picture) -> None:
    handles = [
        Line2D([], [], color=QUIET, linewidth=9, alpha=0.55, label="holds the lease"),
        Line2D([], [], color=QUIET, linewidth=1.3, marker=".", label="message, to its dot"),
        Line2D([], [], color=FAINT, linewidth=1.5, label="to or from the master"),
        Line2D([], [], color=QUIET, marker="o", linestyle="", label="acknowledged"),
        Line2D([], [], color=ALARM, marker="X", linestyle="", markersize=9, label="refused"),
    ]
    picture.explain(handles, 5, fontsize=12, labelcolor=QUIET, handlelength=1.6, columnspacing=1.4)
