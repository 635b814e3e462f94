"""Hundreds of boxes, texts or arrows as one path: they cost as much as a few ordinary ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.textpath import TextPath

from dtlab.plots.palette import PAPER

Corners = list[tuple[float, float]]


def corners(x: float, y: float, w: float, h: float) -> Corners:
    """Return the corners of a box of this size, from (x, y) on."""
    return [(x, y), (x + w, y), (x + w, y + h), (x, y + h)]


def draw_boxes(axes: Axes, boxes: Sequence[Corners], hatch: str = "", **look: Any) -> None:
    """Draw boxes of one look; a hatch has the colour of its edge."""
    if boxes:
        codes = np.tile([Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY], len(boxes))
        outlines = np.concatenate([[*box, box[0]] for box in boxes])
        axes.add_artist(PathPatch(Path(outlines, codes), hatch=hatch, **look))


def draw_stack(axes: Axes, row: float, parts: Sequence[tuple[str, float, str, str]], *,
               height: float, named: bool) -> None:
    """Draw a bar to the right for each (name, length, colour, hatch), one after the other; with
    their names in the legend if this row is `named`."""
    left = 0.0
    for name, length, color, hatch in parts:
        axes.barh(row, length, left=left, height=height, color=color, hatch=hatch, linewidth=0.6,
                  edgecolor=PAPER, label=name if named else None)
        left += length


def draw_arrows(axes: Axes, tails: Any, heads: Any, **look: Any) -> None:
    """Draw an arrow from each of `tails` to its head, (x, y) each."""
    if len(tails):
        tail, head = np.array(tails, float), np.array(heads, float)
        axes.quiver(*tail.T, *(head - tail).T, angles="xy", scale_units="xy", scale=1,
                    units="inches", headlength=6, headaxislength=5.5, edgecolor=PAPER,
                    minlength=0, **look)


def write_many(axes: Axes, texts: Sequence[tuple[str, float, float]], *, size: float, color: str,
               weight: str = "normal", halo: str = "") -> None:
    """Write each (text, x, y), centred on its place in the axes, whose limits must be final.

    halo: a colour around the letters, to lift them off what lies behind.
    """
    page = axes.get_figure()
    paths = [(glyphs(text, size, weight), (x, y)) for text, x, y in texts if text]
    if not paths or page is None:
        return
    places = axes.transData.transform([place for _, place in paths]) / page.dpi  # in inches
    whole = Path.make_compound_path(*(
        Path(np.asarray(path.vertices) / 72 + place, path.codes)
        for (path, _), place in zip(paths, places, strict=True)))
    for fill, edge, width, depth in ((halo, halo, 3.0, 5.0), (color, "none", 0.0, 5.1)):
        if fill:
            axes.add_artist(PathPatch(whole, facecolor=fill, edgecolor=edge, linewidth=width,
                                      zorder=depth, transform=page.dpi_scale_trans))


@lru_cache(maxsize=4096)
def glyphs(text: str, size: float, weight: str) -> Path:
    """The outline of `text`, in points, its middle at (0, 0)."""
    path = TextPath((0, 0), text, size=size, prop=FontProperties(weight=weight))
    width = path.get_extents().x1 if len(path.vertices) else 0.0
    return Path(np.asarray(path.vertices) - [width / 2, 0.36 * size], path.codes)
