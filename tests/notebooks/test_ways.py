"""Each chapter opens with its question and a picture, and leads to the chapters beside it."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.chapter import CHAPTERS

MOST_LETTERS = 320  # of the question: about three lines


def parametrized(chapters: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", chapters, ids=lambda path: path.stem)


@parametrized(CHAPTERS)
def test_the_opening_is_a_title_a_line_and_a_question(path: Path) -> None:
    opening = nbformat.read(path, as_version=4).cells[0].source
    title, line, question = opening.split("\n\n")
    assert title.startswith("# ")
    assert re.search(r"About \d+\sminutes", line)
    assert question.startswith("**The question.** ")
    assert len(question) <= MOST_LETTERS


@parametrized(CHAPTERS)
def test_a_picture_stands_among_the_first_four_cells(path: Path) -> None:
    first = nbformat.read(path, as_version=4).cells[:4]
    assert any("image/png" in output.get("data", {}) for cell in first
               for output in cell.get("outputs", ()))


@parametrized(CHAPTERS[1:])
def test_the_opening_links_the_chapter_before(path: Path) -> None:
    before = CHAPTERS[CHAPTERS.index(path) - 1]
    assert f"]({before.name})" in nbformat.read(path, as_version=4).cells[0].source


@parametrized(CHAPTERS)
def test_the_last_cell_links_the_exercises_and_the_next_chapter(path: Path) -> None:
    last = nbformat.read(path, as_version=4).cells[-1].source
    (exercises,) = re.findall(r"\]\((\.\./exercises/\w+\.ipynb)\)", last)
    assert (path.parent / exercises).exists()
    assert exercises.startswith(f"../exercises/{path.stem[:2]}_")
    for following in CHAPTERS[CHAPTERS.index(path) + 1 :][:1]:
        assert f"]({following.name})" in last
