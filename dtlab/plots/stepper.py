"""One frame of a collective: who holds which piece with whose contributions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.patches import Rectangle

from dtlab.plots.palette import ALARM, EDGE, EMPTY, FAINT, FRESH, INK, PAPER, QUIET, mix, rank_style
from dtlab.plots.picture import MARGIN_IN, Picture, page
from dtlab.plots.shapes import Corners, corners, draw_boxes, write_many
from dtlab.recording.frames import Arrow, CollectiveFrame
from dtlab.units import bytes_text, count_text

WIDTH_IN, HEIGHT_IN = 11.0, 6.6
_LEFT_IN, _RIGHT_IN, _BOTTOM_IN, _TOP_IN = 1.3, 0.3, 0.8, 1.35


class StepperLayout(NamedTuple):
    """The places of things, in inches from the top left corner of the grid."""

    row: float  # height of a rank's row
    column: float  # width of a piece's column
    box_w: float
    box_h: float
    grid: float  # width of all columns; the arrows of several pieces run to the right of it
    margin: float  # width of that space
    height: float  # of the whole picture

    @staticmethod
    def of(frame: CollectiveFrame) -> StepperLayout:
        """The layout of all frames of one run: the same, so that nothing jumps between them."""
        width = WIDTH_IN - _LEFT_IN - _RIGHT_IN
        row = min((HEIGHT_IN - _TOP_IN - _BOTTOM_IN) / frame.ranks, 1.2)
        height = _TOP_IN + _BOTTOM_IN + row * frame.ranks
        margin = 1.7 if frame.wide else 0.0
        column = min((width - margin) / frame.pieces, 3.4 if frame.what == "arrivals" else 2.2)
        gutter = max(0.14, min(0.45, 0.24 * column)) if not frame.wide else 0.1
        grid = column * frame.pieces
        return StepperLayout(row, column, column - gutter, row * 0.8, grid, width - grid, height)

    def box(self, rank: int, piece: int) -> tuple[float, float]:
        """The top left corner of a cell's box."""
        return piece * self.column, rank * self.row + (self.row - self.box_h) / 2


def stepper(frame: CollectiveFrame) -> Picture:
    """Ranks × pieces. In each box, a bar with one segment a contributor, and their number.

    Yellow: changed in this step. Heavy border and ✓: complete. ✗: holds what it never may.
    Arrows: the messages that arrived in this step; those of one piece run beside its column, those
    of several at the right edge, with their pieces written at them.
    """
    layout = StepperLayout.of(frame)
    with page(WIDTH_IN, layout.height, heading(frame), progress(frame)) as picture:
        axes = picture.place(left=_LEFT_IN, right=_RIGHT_IN, bottom=_BOTTOM_IN, top=_TOP_IN)
        _draw_labels(axes, frame, layout)
        _draw_boxes(axes, frame, layout)
        _draw_counts(axes, frame, layout)
        _draw_arrows(axes, frame, layout)
        _draw_foot(picture, frame)
    picture.alt = describe(frame)
    return picture


def describe(frame: CollectiveFrame) -> str:
    """The frame in words: what moved, what is complete. The text alternative of its picture."""
    moved = [f"rank {a.src} to rank {a.dst} {cargo(a, frame)}".strip() for a in frame.arrows[:8]]
    if len(frame.arrows) > len(moved):
        moved.append(f"{len(frame.arrows) - len(moved)} more")
    messages = f" Messages: {'; '.join(moved)}." if moved else ""
    done = progress(frame)
    return f"{heading(frame)}.{messages} {done[0].upper()}{done[1:]}."


def heading(frame: CollectiveFrame) -> str:
    """Algorithm, ranks and step: the title of a frame."""
    step = f"step {frame.step} of {frame.steps}"
    if not frame.step:
        step = f"before step 1 of {frame.steps}"
    if not frame.steps:
        step = "nothing to do"
    return f"{frame.title} (simulated, {count_text(frame.ranks, 'rank')}): {step}"


def progress(frame: CollectiveFrame) -> str:
    """Pieces complete, and bytes sent so far."""
    parts = []
    if frame.judged.any():
        unit = "piece" if frame.what == "piece" else "rank"
        goal = count_text(int(frame.judged.sum()), unit)
        parts.append(f"complete: {int(frame.complete.sum())} of {goal}")
    if frame.wrong.any():
        parts.append(f"spoilt: {int(frame.wrong.sum())}")
    if frame.total_bytes:
        vectors = frame.sent_bytes / frame.vector_bytes if frame.vector_bytes else 0.0
        times = f" ({vectors:.3g} × a vector of {bytes_text(frame.vector_bytes)})"
        parts.append(f"sent so far: {bytes_text(frame.sent_bytes)}"
                     f"{times if frame.vector_bytes else ''} of {bytes_text(frame.total_bytes)}")
    return " · ".join(parts) or "empty messages only"


def cargo(arrow: Arrow, frame: CollectiveFrame) -> str:
    """The load of an arrow: "piece 2", "pieces 0–3", "all pieces"; its bytes if unknown."""
    pieces = arrow.pieces
    if not pieces:
        return bytes_text(arrow.nbytes) if frame.what == "piece" else ""
    if len(pieces) == 1:
        return f"piece {pieces[0]}"
    if len(pieces) == frame.pieces:
        return "all pieces"
    if pieces[-1] - pieces[0] == len(pieces) - 1:
        return f"pieces {pieces[0]}–{pieces[-1]}"
    return "pieces " + ", ".join(map(str, pieces)) if len(pieces) < 4 else f"{len(pieces)} pieces"


def _draw_labels(axes: Axes, frame: CollectiveFrame, layout: StepperLayout) -> None:
    axes.set_xlim(0, WIDTH_IN - _LEFT_IN - _RIGHT_IN)
    axes.set_ylim(layout.height - _TOP_IN - _BOTTOM_IN, 0)
    axes.set_axis_off()
    size = min(14.0, layout.row * 72 * 0.72)
    for rank in range(frame.ranks):
        style, middle = rank_style(rank), (rank + 0.5) * layout.row
        axes.add_artist(Rectangle((-0.26, middle - layout.box_h / 2), 0.15, layout.box_h,
                                  facecolor=style.color, hatch=style.hatch, edgecolor=style.ink,
                                  linewidth=0, clip_on=False))
        axes.text(-0.34, middle, f"rank {rank}", ha="right", va="center_baseline", size=size)
    narrow = layout.box_w < 0.8
    for piece in range(frame.pieces):
        name = "has heard from" if frame.what == "arrivals" else f"piece {piece}"
        axes.text(piece * layout.column + layout.box_w / 2, -0.1,
                  str(piece) if narrow else name, ha="center", va="bottom",
                  size=13 if not narrow else 12)
    if narrow and frame.what == "piece":
        axes.text(-0.34, -0.1, "piece", ha="right", va="bottom", size=13)


def _draw_boxes(axes: Axes, frame: CollectiveFrame, layout: StepperLayout) -> None:
    """Draw boxes, and in each the bar: the segment of contributor c is always at the same place."""
    w, h = layout.box_w, layout.box_h
    boxes, faces, edges, widths = [], [], [], []
    segments, colors = [], []
    twice: list[Corners] = []
    complete, wrong = frame.complete, frame.wrong
    heavy = 3.0 if h > 0.3 else 1.8
    thin = 0.4 if w / frame.ranks > 0.05 else 0.0
    for rank, piece in np.ndindex(frame.ranks, frame.pieces):
        x, y = layout.box(rank, piece)
        boxes.append(corners(x, y, w, h))
        faces.append(FRESH if frame.changed[rank, piece] and frame.step else PAPER)
        spoilt, ready = wrong[rank, piece], complete[rank, piece]
        edges.append(ALARM if spoilt else INK if ready else EDGE)
        widths.append(heavy if spoilt or ready else 1.0)
        held = frame.holds[rank, piece]
        shown = np.flatnonzero(frame.wanted[rank, piece] | (held > 0))
        pad = min(0.07, 0.1 * w)
        part = (w - 2 * pad) / max(1, len(shown))
        for place, contributor in enumerate(shown):
            box = corners(x + pad + place * part, y + 0.56 * h, part, 0.36 * h)
            segments.append(box)
            colors.append(rank_style(int(contributor)).color if held[contributor] else EMPTY)
            if held[contributor] > 1 or held[contributor] < 0:
                twice.append(box)
    axes.add_collection(PolyCollection(list(np.array(boxes)), facecolors=faces, edgecolors=edges,
                                       linewidths=widths, joinstyle="miter"), autolim=False)
    axes.add_collection(PolyCollection(list(np.array(segments)), facecolors=colors,
                                       edgecolors=EDGE, linewidths=thin), autolim=False)
    draw_boxes(axes, twice, "xxx", facecolor="none", edgecolor=INK, linewidth=2)


def _draw_counts(axes: Axes, frame: CollectiveFrame, layout: StepperLayout) -> None:
    """Write in each box "3/4", "✓ 4/4", "✗ 5/4"; no count where one contributor is wanted.

    Where a box is small: the count alone, or ✓ or ✗ alone.
    """
    complete, wrong = frame.complete, frame.wrong
    small = layout.box_w < 0.6
    letters = 1.6 if small else 4.2 if frame.ranks < 10 else 6.5
    size = min(15.0, layout.box_h * 72 * (0.5 if small else 0.4),
               layout.box_w * 72 / letters / 0.6)
    places: dict[tuple[str, str], list[tuple[str, float, float]]] = {}
    for rank, piece in np.ndindex(frame.ranks, frame.pieces):
        goal = int(frame.wanted[rank, piece].sum())
        held = int(frame.holds[rank, piece].sum())
        spoilt, ready = wrong[rank, piece], complete[rank, piece]
        mark = "✗" if spoilt else "✓" if ready else ""
        count = f"{held}/{goal}" if goal > 1 else ""
        if small:
            count = "" if mark or goal == 1 else str(held)
        color = ALARM if spoilt else INK if frame.judged[rank, piece] else QUIET
        x, y = layout.box(rank, piece)
        places.setdefault((color, "bold" if mark else "normal"), []).append(
            (f"{mark} {count}".strip(), x + layout.box_w / 2, y + 0.3 * layout.box_h))
    if size < 6:  # more than 16 ranks or so: only the bars can be read
        return
    for (color, weight), texts in places.items():
        write_many(axes, texts, size=size, color=color, weight=weight)


def _draw_arrows(axes: Axes, frame: CollectiveFrame, layout: StepperLayout) -> None:
    """Each arrow leaves its sender's row, goes up or down in a lane of its own, and turns in."""
    gutters: dict[int, list[Arrow]] = {}
    for arrow in frame.arrows:
        column = arrow.pieces[0] if len(arrow.pieces) == 1 and not frame.wide else -1
        gutters.setdefault(column, []).append(arrow)
    lines, colors, heads = [], [], []
    for column, arrows in gutters.items():
        lane_of, lanes = _lanes(arrows)
        begin, room = layout.grid - (layout.column - layout.box_w), layout.margin
        if column >= 0:
            begin = column * layout.column + layout.box_w
            room = layout.column - layout.box_w - 0.03
        loads = {cargo(arrow, frame) for arrow in arrows}
        stub = 0.95 if column < 0 and len(loads) > 1 else 0.0  # room for labels
        if column < 0 and len(loads) == 1:
            axes.text(begin + 0.3, -0.1, loads.pop(), ha="left", va="bottom", size=13)
        for arrow, lane in zip(arrows, lane_of, strict=True):
            x = begin + stub + (room - stub) * (lane + 0.75) / (lanes + 0.5)
            leave = (arrow.src + 0.5) * layout.row - 0.13 * layout.box_h
            enter = (arrow.dst + 0.5) * layout.row + 0.18 * layout.box_h
            color = mix(rank_style(arrow.src).color, "black", 0.15)
            lines.append([(begin + 0.02, leave), (x, leave), (x, enter), (begin + 0.07, enter)])
            colors.append(color)
            heads.append((begin + 0.09, enter, color))
        for leave, text in _labels(arrows, frame, layout) if stub else ():
            axes.text(begin + 0.08, leave - 0.03, text, zorder=6, va="bottom", ha="left",
                      size=max(7.0, min(12.0, layout.row * 72 * 0.36)))
    thick = 3.0 if frame.ranks <= 8 else 2.0
    axes.add_collection(LineCollection(lines, colors=PAPER, linewidths=thick + 2, zorder=3),
                        autolim=False)
    axes.add_collection(LineCollection(lines, colors=colors, linewidths=thick, zorder=4),
                        autolim=False)
    if heads:
        xs, ys, fills = zip(*heads, strict=True)
        axes.scatter(xs, ys, marker="<", s=(thick * 3.6) ** 2, c=fills, zorder=5, clip_on=False,
                     edgecolors=PAPER, linewidths=0.5)


def _labels(arrows: list[Arrow], frame: CollectiveFrame, layout: StepperLayout
            ) -> list[tuple[float, str]]:
    """Return the height and the text of each sender's cargo, all its messages together."""
    found = []
    for src in sorted({arrow.src for arrow in arrows}):
        own = [arrow for arrow in arrows if arrow.src == src]
        pieces = tuple(sorted({piece for arrow in own for piece in arrow.pieces}))
        together = own[0] if len(own) == 1 else Arrow(src, -1, sum(a.nbytes for a in own), pieces)
        found.append(((src + 0.5) * layout.row - 0.13 * layout.box_h, cargo(together, frame)))
    return found


def _lanes(arrows: list[Arrow]) -> tuple[list[int], int]:
    """A lane for each arrow such that two in one lane never meet; and how many lanes there are."""
    taken: list[list[tuple[int, int]]] = []
    chosen = []
    for arrow in arrows:
        low, high = sorted((arrow.src, arrow.dst))
        lane = next((i for i, stretches in enumerate(taken)
                     if all(high < a or low > b for a, b in stretches)), len(taken))
        if lane == len(taken):
            taken.append([])
        taken[lane].append((low, high))
        chosen.append(lane)
    return chosen, len(taken)


def _draw_foot(picture: Picture, frame: CollectiveFrame) -> None:
    """Draw the current step, as a bar with one field a step; and the meaning of the signs."""
    axes = picture.place(left=MARGIN_IN, right=MARGIN_IN, bottom=0.18,
                      top=picture.get_figheight() - 0.62)
    width = WIDTH_IN - 2 * MARGIN_IN
    axes.set_xlim(0, width)
    axes.set_ylim(0, 0.44)
    axes.set_axis_off()
    bar, steps = 4.2, max(1, frame.steps)
    fields = [corners(i * bar / steps, 0.12, bar / steps * 0.94, 0.2) for i in range(steps)]
    faces = [INK if i < frame.step else FAINT for i in range(steps)]
    axes.add_collection(PolyCollection(fields, facecolors=faces, edgecolors="none"), autolim=False)
    axes.text(bar + 0.08, 0.22, f"{frame.step}/{frame.steps}", va="center", size=13)
    for x, face, edge, thick, text in ((5.6, FRESH, EDGE, 1.0, "changed now"),
                                       (7.45, PAPER, INK, 3.0, "✓ complete")):
        axes.add_artist(Rectangle((x, 0.1), 0.34, 0.24, facecolor=face, edgecolor=edge,
                                 linewidth=thick))
        axes.text(x + 0.44, 0.22, text, va="center", size=13)
    axes.plot([9.2, 9.55], [0.22, 0.22], color=INK, lw=3, solid_capstyle="butt")
    axes.plot([9.22], [0.22], marker="<", color=INK, ms=9)
    axes.text(9.65, 0.22, "message", va="center", size=13)
