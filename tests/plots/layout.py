"""What can be asked of any picture: does its text overlap, does it leave the page?"""

from __future__ import annotations

import io
import itertools
from functools import lru_cache

from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from dtlab.plots import Picture
from dtlab.plots.picture import styled


@lru_cache(maxsize=4)
def texts_of(picture: Picture) -> list[tuple[str, Bbox]]:
    """Every text that is drawn, with its place in pixels."""
    if picture.stale:  # not drawn yet
        with styled():
            picture.canvas.draw()  # lays it out
    renderer = picture.canvas.get_renderer()  # type: ignore[attr-defined]
    found, hidden = [], _hidden(picture)
    for text in picture.findobj(Text):
        assert isinstance(text, Text)
        written = text.get_text().strip()
        if written and text.get_visible() and text not in hidden:
            found.append((written, text.get_window_extent(renderer)))
    return found


def _hidden(picture: Picture) -> set[Text]:
    """Texts of axes that are switched off, and tick labels outside the axes' limits."""
    hidden: set[Text] = set()
    for axes in picture.axes:
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            low, high = sorted(limits)
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not axes.axison or not low <= tick.get_loc() <= high:
                    hidden |= {tick.label1, tick.label2}
            if not axes.axison:
                hidden |= {axis.label, axis.offsetText}
    return hidden


def overlaps(picture: Picture, slack_px: float = 2.0) -> list[tuple[str, str]]:
    """Pairs of texts that lie on each other by more than `slack_px` both ways."""
    found = []
    for (one, a), (other, b) in itertools.combinations(texts_of(picture), 2):
        wide = min(a.x1, b.x1) - max(a.x0, b.x0)
        high = min(a.y1, b.y1) - max(a.y0, b.y0)
        if wide > slack_px and high > slack_px:
            found.append((one, other))
    return found


def off_page(picture: Picture) -> list[str]:
    """Texts that are not wholly on the page."""
    width, height = (size * picture.dpi for size in picture.get_size_inches())
    return [text for text, box in texts_of(picture)
            if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1]


def title_of(picture: Picture) -> str:
    """The text of the heading."""
    return picture.texts[0].get_text()


def pixels(png: bytes) -> Image.Image:
    """A decoded PNG."""
    return Image.open(io.BytesIO(png)).convert("RGB")
