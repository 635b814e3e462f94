"""The common form of all pictures: one size of type, one place for the title, an alt text.

Pictures never touch pyplot, so nothing is drawn twice, none stays open, and a widget may render in
a few milliseconds.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from dtlab.plots.palette import INK, QUIET

_STYLE = mpl.rc_params_from_file(str(files("dtlab.plots") / "dtlab.mplstyle"),
                                 use_default_template=False)
MARGIN_IN = 0.3  # left and right of the title
SMALLEST = 9  # points of a text that is shrunk
DPI = 100  # of a picture on a page


@contextmanager
def styled() -> Iterator[None]:
    """Inside, matplotlib draws in the course's style, whatever style the reader has set."""
    with mpl.rc_context():
        mpl.rcParams.update(_STYLE)
        yield


class Picture(Figure):
    """A matplotlib figure that shows itself in a notebook and carries a text alternative.

    `alt` says in words what the picture shows; it is also the plain-text output beside the image.
    """

    alt: str = ""

    def place(self, *, left: float, right: float, bottom: float, top: float) -> Axes:
        """Axes with these margins, in inches: fixed, so that nothing jumps from frame to frame."""
        width, height = self.get_size_inches()
        size = (width - left - right) / width, (height - bottom - top) / height
        return self.add_axes((left / width, bottom / height, *size))

    def explain(self, handles: Sequence[Any], columns: int, **look: Any) -> None:
        """Explain the signs, at the lower left corner of the page."""
        width, height = self.get_size_inches()
        self.legend(handles=handles, ncols=columns, loc="lower left", borderaxespad=0,
                    bbox_to_anchor=(MARGIN_IN / width, 0.12 / height), **look)

    def png(self) -> bytes:
        """The picture as PNG bytes."""
        with styled():
            self.set_dpi(DPI)
            canvas = FigureCanvasAgg(self)
            canvas.draw()
            pixels = np.asarray(canvas.buffer_rgba())[..., :3]
            page = io.BytesIO()
            Image.fromarray(pixels).save(page, "PNG", compress_level=6)
            return page.getvalue()

    def svg(self) -> bytes:
        """The picture as SVG, its text as text: sharp at any size, and drawn in a third of the time
        of a PNG. Where DejaVu Sans is missing, Verdana stands in, whose letters are as wide."""
        page = io.BytesIO()
        with styled(), mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dtlab",
                                       "font.sans-serif": ["DejaVu Sans", "Verdana"]}):
            self.savefig(page, format="svg", metadata={"Date": None})
        return page.getvalue()

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        data = {"image/png": self.png(), "text/plain": self.alt}
        return data, {"image/png": {"alt": self.alt}}

    def __repr__(self) -> str:
        return self.alt or super().__repr__()


@contextmanager
def page(width_in: float, height_in: float, title: str, subtitle: str = "") -> Iterator[Picture]:
    """Make a picture of this size, to be drawn in inside. The title stands top left, bold; under it
    one quiet line. Long ones shrink to fit the width."""
    with styled():
        picture = Picture(figsize=(width_in, height_in), dpi=DPI)
        FigureCanvasAgg(picture)
        for text, size, weight, color, top in ((title, 18, "bold", INK, 0.18),
                                               (subtitle, 13, "normal", QUIET, 0.56)):
            fit_text(picture.text(MARGIN_IN / width_in, 1 - top / height_in, text, va="top",
                                  size=size, weight=weight, color=color), width_in - 2 * MARGIN_IN)
        yield picture


def fit_text(text: Text, width_in: float) -> None:
    """Shrink `text` until it is no wider than `width_in` inches; below 9 points, cut its end."""
    # DejaVu Sans: on average 0.6 of the type size a letter, bold 0.7.
    share = 0.7 if text.get_fontweight() == "bold" else 0.62
    letters = len(text.get_text())
    if not letters:
        return
    size = min(float(text.get_fontsize()), width_in * 72 / letters / share)
    text.set_fontsize(max(SMALLEST, size))
    if size < SMALLEST:
        text.set_text(text.get_text()[: int(width_in * 72 / SMALLEST / share) - 1] + "…")


def clock_name(virtual: bool) -> str:
    """Return the word for times that a title must have: "simulated" or "measured"."""
    return "simulated" if virtual else "measured"
