"""A colour for every rank, the same in every picture of the course.

Eight hues that stay apart for people with protanopia, deuteranopia or tritanopia (a test computes
it), then the same hues lighter and darker. Colour never speaks alone: a rank also has a number, a
hatch and a marker.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from matplotlib.colors import to_hex, to_rgb

INK = "#1c2833"  # text, strong lines
DARK = "#0a0f14"  # text on a rank's colour
QUIET = "#5d6d7e"  # secondary text, axes, hatches: 5.3:1 on white
FAINT = "#d5dbe1"  # grids, empty cells
PAPER = "#ffffff"
EMPTY, EDGE = "#eef1f4", "#9aa7b4"  # of a box of a grid: what it lacks; its border
FRESH = "#fff1b8"  # what this step has changed
ALARM = "#b3001b"  # what went wrong; always together with a word or a sign

HUES = ("#1668e8", "#f0a000", "#00785f", "#e8408a", "#45b8ec", "#7a2e08", "#54338a", "#8c7a30")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_MORE_MARKERS = ("<", "p", ">", "d", "h", "H", "8", ".")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (2.5, 1)),
           (0, (6, 1.2, 1, 1.2, 1, 1.2)), (0, (8, 3)), (0, (1, 2.2)))
# Ranks 8 to 15 are the eight hues lighter, 16 to 23 darker, 24 to 31 lighter still.
_ROUNDS = (("", 0.0, "white"), ("//", 0.45, "white"), ("..", 0.4, "black"), ("xx", 0.7, "white"))


class RankStyle(NamedTuple):
    """The look of one rank: its fill, the colour of text on it, its hatch, its points' marker."""

    color: str
    ink: str
    hatch: str
    marker: str


@lru_cache
def rank_style(rank: int) -> RankStyle:
    """The looks of `rank`, any number from 0. They repeat, in full, after 32 ranks."""
    hatch, share, towards = _ROUNDS[rank // len(HUES) % len(_ROUNDS)]
    color = mix(HUES[rank % len(HUES)], towards, share)
    return RankStyle(color, ink_on(color), hatch, _MARKERS[rank % len(_MARKERS)])


def rank_color(rank: int) -> str:
    """The colour of `rank`, as "#rrggbb"."""
    return rank_style(rank).color


class LineStyle(NamedTuple):
    """The look of one curve: told apart by dashes and marker where its colour can't be."""

    color: str
    dashes: str | tuple[int, tuple[float, ...]]
    marker: str


def line_style(index: int) -> LineStyle:
    """The looks of the curve number `index` of a picture. They repeat, in full, after 16."""
    second = index // 8 % 2  # round
    color = mix(HUES[index % 8], "black", 0.35 * second)
    markers = _MORE_MARKERS if second else _MARKERS
    return LineStyle(color, _DASHES[(index + 3 * second) % 8], markers[index % 8])


@lru_cache(maxsize=1024)
def mix(color: str, towards: str, share: float) -> str:
    """Return `color` with `share` (0 to 1) of the way gone `towards` another colour."""
    ours, theirs = np.array(to_rgb(color)), np.array(to_rgb(towards))
    red, green, blue = (1 - share) * ours + share * theirs
    return to_hex((red, green, blue))


@lru_cache(maxsize=1024)
def ink_on(color: str) -> str:
    """Dark or white text, whichever reads better on `color`."""
    return DARK if contrast(color, DARK) >= contrast(color, PAPER) else PAPER


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio of two colours, 1 (equal) to 21 (black on white)."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(color: str) -> float:
    """Relative luminance of an sRGB colour, 0 to 1 (WCAG 2)."""
    channels = np.array(to_rgb(color))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ np.array([0.2126, 0.7152, 0.0722]))
