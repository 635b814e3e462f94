"""All collectives in one picture: what every rank holds before, and what it must hold after."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from dtlab.checks import check_choice, check_whole
from dtlab.collectives import ALGORITHMS
from dtlab.errors import ConfigError
from dtlab.plots.palette import EDGE, EMPTY, INK, PAPER, QUIET, rank_style
from dtlab.plots.picture import MARGIN_IN, Picture, page
from dtlab.plots.shapes import corners, write_many
from dtlab.recording.specification import Specification
from dtlab.units import count_text

WIDTH_IN, ACROSS, MOST_RANKS = 11.0, 3, 8
DATA = tuple(name for name in ALGORITHMS if name != "barrier")  # those that move any


def before_and_after(
    ranks: int = 4, root: int = 0, collectives: Sequence[str] = DATA) -> Picture:
    """Draw two grids for each collective, ranks × pieces: before, and after. Number and colour are
    the rank that contributed; several side by side, their sum; one below the other, the parts of
    several. Boxes that do not matter in the end are left out there.

    ranks: 2 to 8. Raises `ConfigError` for others, a root that is none, or an unknown name.
    """
    if not isinstance(ranks, int) or not 2 <= ranks <= MOST_RANKS:
        raise ConfigError(f"this picture can show 2 to {MOST_RANKS} ranks, not {ranks}")
    check_whole("root", root, 0, ranks - 1)
    rows = -(-len(collectives) // ACROSS)
    side, cell_w = 1.25, (WIDTH_IN - 2 * MARGIN_IN) / ACROSS
    cell_h = side + 0.75
    with page(WIDTH_IN, rows * cell_h + 1.15, f"Before and after, {count_text(ranks, 'rank')}",
                    "row: rank · column: piece · colour: who gave it · side by side: a sum · "
                    f"one below the other: parts · root: rank {root}") as picture:
        axes = picture.place(left=MARGIN_IN, right=MARGIN_IN, bottom=0.1, top=1.0)
        axes.set_xlim(0, WIDTH_IN - 2 * MARGIN_IN)
        axes.set_ylim(picture.get_figheight() - 1.1, 0)
        axes.set_axis_off()
        for number, name in enumerate(collectives):
            x, y = number % ACROSS * cell_w, number // ACROSS * cell_h
            _draw_pair(axes, name, ranks, root, x, y, side)
    picture.alt = (f"What each of {ranks} ranks holds before and after: "
                   f"{', '.join(collectives)}; root {root}.")
    return picture


def _draw_pair(axes: Axes, name: str, p: int, root: int, x: float, y: float, side: float) -> None:
    check_choice("collective", name, DATA)
    spec = Specification.of(name, p, root)
    after = spec.wanted & spec.judged[..., None]
    axes.text(x, y + 0.12, name, weight="bold", size=14, va="center", color=INK)
    top, middle = y + 0.32, y + 0.32 + side / 2
    _draw_grid(axes, spec.given, np.ones_like(spec.judged), x, top, side, spec.moves)
    axes.annotate("", (x + side + 0.62, middle), (x + side + 0.12, middle),
                  arrowprops={"arrowstyle": "-|>", "color": QUIET, "lw": 2.5})
    _draw_grid(axes, after, spec.judged, x + side + 0.74, top, side, spec.moves)


def _draw_grid(axes: Axes, holds: np.ndarray, shown: np.ndarray, x: float, y: float,
               side: float, parts: bool) -> None:
    """Draw a box for each (rank, piece) that is `shown`; in it a segment for each contributor."""
    p = len(holds)
    step, gap = side / p, 0.12 * side / p
    boxes, faces, frames = [], [], []
    numbers: dict[str, list[tuple[str, float, float]]] = {}
    for rank, piece in np.argwhere(shown):
        left, top, wide = x + piece * step, y + rank * step, step - gap
        givers = np.flatnonzero(holds[rank, piece])
        frames.append(corners(left, top, wide, wide))
        for place, giver in enumerate(givers):
            part = wide / len(givers)
            boxes.append(corners(left, top + place * part, wide, part) if parts else
                         corners(left + place * part, top, part, wide))
            faces.append(rank_style(int(giver)).color)
        if len(givers) == 1:
            numbers.setdefault(rank_style(int(givers[0])).ink, []).append(
                (str(givers[0]), left + wide / 2, top + wide / 2))
    axes.add_collection(PolyCollection(frames, facecolors=EMPTY, edgecolors="none"),
                        autolim=False)
    axes.add_collection(PolyCollection(boxes, facecolors=faces, edgecolors=PAPER, linewidths=0.5),
                        autolim=False)
    axes.add_collection(PolyCollection(frames, facecolors="none", edgecolors=EDGE,
                                       linewidths=1.0), autolim=False)
    for ink, texts in numbers.items():
        write_many(axes, texts, size=min(12.0, step * 36), color=ink)
