"""Hundreds of short texts, drawn as one path: they cost as much as a few ordinary ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Transform


def write_many(
    axes: Axes, texts: Sequence[tuple[str, float, float]], *, size: float, color: str,
    weight: str = "normal", halo: str = "", downwards: bool = False,
    transform: Transform | None = None,
) -> None:
    """Write each (text, x, y), in inches, centred on its place.

    transform: from inches to pixels; None: the axes' data are inches. downwards: whether y grows
    downwards there. halo: a colour around the letters, to lift them off what lies behind.
    """
    scale = np.array([1 / 72, -1 / 72 if downwards else 1 / 72])
    paths = [(glyphs(text, size, weight), x, y) for text, x, y in texts if text]
    if not paths:
        return
    moved = [Path(np.asarray(path.vertices) * scale + [x, y], path.codes) for path, x, y in paths]
    whole = Path.make_compound_path(*moved)
    for fill, edge, width, depth in ((halo, halo, 3.0, 5.0), (color, "none", 0.0, 5.1)):
        if fill:
            patch = PathPatch(whole, facecolor=fill, edgecolor=edge, linewidth=width, zorder=depth)
            if transform is not None:
                patch.set_transform(transform)
            axes.add_artist(patch)


@lru_cache(maxsize=4096)
def glyphs(text: str, size: float, weight: str) -> Path:
    """The outline of `text`, in points, its middle at (0, 0)."""
    path = TextPath((0, 0), text, size=size, prop=FontProperties(weight=weight))
    width = path.get_extents().x1 if len(path.vertices) else 0.0
    return Path(np.asarray(path.vertices) - [width / 2, 0.36 * size], path.codes)
