"""A rank has one colour, and nobody needs to see colours to tell ranks apart."""

import matplotlib as mpl
import numpy as np
import pytest

from dtlab.plots import line_style, rank_color, rank_style
from dtlab.plots.palette import HUES, PAPER, contrast
from dtlab.plots.picture import styled
from tests.plots.color_vision import EYES, difference, least_difference

OKABE_ITO = ["#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
             "#000000"]


@pytest.mark.parametrize(("one", "other", "expected"), [  # rows 1, 7, 13, 19 of Sharma et al.
    ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
    ((50, 0, 0), (50, -1, 2), 2.3669),
    ((50, 2.5, 0), (50, 0, -2.5), 4.3065),
    ((50, 2.5, 0), (50, 3.2972, 0), 1.0),
])
def test_the_oracle_gives_the_published_differences(
    one: tuple[float, ...], other: tuple[float, ...], expected: float
) -> None:
    assert difference(np.array(one), np.array(other)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("eye", EYES)
def test_the_hues_stay_further_apart_than_the_palette_everyone_recommends(eye: str) -> None:
    assert least_difference(list(HUES), eye) > least_difference(OKABE_ITO, eye)
    assert least_difference([rank_color(rank) for rank in range(4)], eye) > 13


def test_ranks_differ_in_more_than_colour() -> None:
    looks = {(s.hatch, s.marker) for s in map(rank_style, range(32))}
    assert len(looks) == 32
    assert len({rank_color(rank) for rank in range(32)}) == 32


def test_a_rank_number_reads_on_its_colour() -> None:
    for rank in range(40):
        style = rank_style(rank)
        assert contrast(style.color, style.ink) >= 4.5, rank  # WCAG 2 AA for text of any size


def test_contrast_of_black_on_white_is_twenty_one() -> None:
    assert contrast("black", "white") == pytest.approx(21)
    assert contrast(PAPER, PAPER) == 1


def test_curves_differ_in_dashes_and_markers() -> None:
    looks = [line_style(index) for index in range(8)]
    assert len({str(look.dashes) for look in looks}) == len({look.marker for look in looks}) == 8


def test_style_file_has_the_ranks_colours_and_legible_type() -> None:
    with styled():
        cycle = [f"#{c.lstrip('#')}" for c in mpl.rcParams["axes.prop_cycle"].by_key()["color"]]
        assert cycle == list(HUES)
        sizes = ("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize",
                 "legend.fontsize")
        assert min(mpl.rcParams[name] for name in sizes) >= 12
        assert mpl.rcParams["figure.facecolor"] == mpl.rcParams["savefig.facecolor"] == "white"
