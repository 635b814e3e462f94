"""The time that a chapter's first page names is what the rule gives.

The rule: a minute for 200 words of text and for each guess, 20 s for what a code cell puts out,
30 s more for a picture, 4 s for a line of code, be it the cell's own or shown by it; and 2 minutes
for each point of the exercises, which are named apart (in some chapters a point takes longer). From
chapter 10 on, where more has to be thought through in as many lines, all of it takes 1.4 times as
long. An appendix and a section that calls itself extra are not counted.
Where the numbers come from: readers' estimates. Three readers' for chapters 00 to 09b differ from
the rule by 7 % in the median, and by 15 % at most; those for 10 to 14 by 3 %, and by 16 % at most.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from dtlab.grading.exercise import catalogue
from tests.notebooks.chapter import CHAPTERS

A_POINT = {"02_machine_room": 3, "04b_everyone_to_everyone": 2.5, "05b_fewer_rounds": 4,
           "06_wires": 2.5, "09b_cut_off": 3, "12_pipelines": 3.5,
           "14_all_together": 4}  # minutes, where not 2
SECOND_HALF = 1.4  # as long as the same words, cells and lines of chapters 00 to 09b


def cells(path: Path) -> list[NotebookNode]:
    """Those that are for all: not an appendix, and no section that calls itself extra."""
    kept, extra = [], False
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.source.startswith("## "):
            heading = cell.source.splitlines()[0]
            extra = heading.startswith("## Appendix") or heading.endswith("(extra)")
        if not extra:
            kept.append(cell)
    return kept


def text_of(path: Path) -> str:
    return "\n".join(cell.source for cell in cells(path) if cell.cell_type == "markdown")


def minutes(path: Path) -> tuple[float, float]:
    """Of a chapter, and of the exercises that it names."""
    text, code = text_of(path), [cell for cell in cells(path) if cell.cell_type == "code"]
    shown = [out.get("data", {}).get("text/markdown", "") for cell in code for out in cell.outputs]
    read = [cell.source for cell in code] + [source for source in shown if "```python" in source]
    lines = sum(1 for source in read for line in source.splitlines() if line.strip())
    guesses = len(re.findall(r"\*\*(?:Before you|Guess)", text))
    guesses += sum(cell.source.startswith("my_guess = ") for cell in code)
    pictures = sum("image/png" in out.get("data", {}) for cell in code for out in cell.outputs)
    chapter = len(text.split()) / 200 + guesses + len(code) / 3 + pictures / 2 + lines / 15
    chapter *= SECOND_HALF if path.stem >= "10" else 1
    return chapter, A_POINT.get(path.stem, 2) * points_of(path)


def points_of(path: Path) -> int:
    return sum(map(int, re.findall(r"\((\d+) points", text_of(path))))


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_the_first_page_names_the_time_that_the_rule_gives_an_hour_at_most(path: Path) -> None:
    words = " ".join(cells(path)[0].source.split())
    named = re.search(r"About (\d+) minutes, and (\d+) for the exercises?\b", words)
    assert named, "*… About N minutes, and M for the exercises.*"
    for printed, computed in zip(named.groups(), minutes(path), strict=True):
        assert int(printed) == pytest.approx(computed, rel=0.2)
    assert int(named[1]) <= 60


def test_the_chapters_name_each_exercise_once_with_its_points() -> None:
    named, earned = Counter[str](), Counter[str]()
    for path in CHAPTERS:
        named[path.stem[:2]] += points_of(path)
    for exercise in catalogue().values():
        earned[exercise.chapter] += int(exercise.points)
    assert named == earned


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_has_40_to_90_cells(path: Path) -> None:
    assert 40 <= len(cells(path)) <= 90
