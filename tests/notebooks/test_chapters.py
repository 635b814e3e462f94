"""Every chapter is built alike, and leads to those beside it; each answer to its guess has a
sentence of its own."""

from __future__ import annotations

import contextlib
import io
import re
import symtable
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import dtlab
from tests.notebooks.chapter import CHAPTERS, NOTEBOOKS, Chapter

RIGHT = {"00_welcome": "B", "01_why_distribute": "D", "02_machine_room": "B", "03_messages": "C",
         "04_collectives": "C", "04b_everyone_to_everyone": "C",
         "05_all_reduce": "C", "05b_fewer_rounds": "C", "06_wires": "D",
         "07_parameter_servers": "C", "08_waiting_less": "C", "08b_sending_less": "B",
         "09_server_dies": "D", "09b_cut_off": "B", "10_data_parallel": "C",
         "11_tensor_parallel": "B", "12_pipelines": "A", "13_zero": "B",
         "13b_zero_in_use": "B",
         "14_all_together": "C", "15_everything_fails": "C",
         "15b_what_failures_cost": "B"}
HALVES = [name for name in RIGHT if name[:2] in ("01", "04", "05", "09", "10", "11", "12", "13",
                                                   "14", "15")
          or name.startswith("08b")]
NEAR = ("00_welcome", "03_messages")  # the answer stands in sight of the question


EVERY = [Chapter(path.stem.partition("_")[0]) for path in CHAPTERS]


def parametrized(chapters: list[Chapter]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("chapter", chapters, ids=lambda chapter: chapter.path.stem)


@parametrized(EVERY)
def test_it_is_built_as_the_readme_of_the_notebooks_says(chapter: Chapter) -> None:
    text = "\n".join(chapter.sources("markdown"))
    number = chapter.path.stem.partition("_")[0]
    order = [r"^# ", rf"^\*Chapter {number}\. Before it: ", r"^\*\*The question\.\*\* ",
             r"Your guess$", r"What breaks, and why$", r"Now you$", r"^## Further reading$"]
    starts = [place.start() for pattern in order if (place := re.search(pattern, text, re.M))]
    assert len(starts) == len(order)
    assert starts == sorted(starts)
    numbers = [int(n) for n in re.findall(r"^## (\d+)\. ", text, flags=re.M)]
    assert numbers == list(range(1, len(numbers) + 1))


@parametrized(EVERY)
def test_the_opening_is_a_title_a_line_and_a_short_question_and_a_picture(chapter: Chapter) -> None:
    first = [*chapter.cells.values()][:4]
    _, line, question = first[0].source.split("\n\n")
    assert re.search(r"About \d+\sminutes", line)
    assert len(question) <= 320  # letters: about three lines
    assert any("image/png" in output.get("data", {}) for cell in first
               for output in cell.get("outputs", ()))


@parametrized(EVERY)
def test_links_lead_somewhere_and_to_the_glossary_and_the_cheat_sheet(chapter: Chapter) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", "\n".join(chapter.sources("markdown")))
    assert links
    assert [link for link in links if not (NOTEBOOKS / link).exists()] == []
    if chapter.path.stem in HALVES:
        assert {"glossary.md", "cheat_sheet.md"} <= set(links)


@parametrized(EVERY)
def test_it_links_the_chapters_beside_it_and_its_exercises(chapter: Chapter) -> None:
    sources = [cell.source for cell in chapter.cells.values()]
    number = EVERY.index(chapter)
    for before in EVERY[:number][-1:]:
        assert f"]({before.path.name})" in sources[0]
    (exercises,) = re.findall(r"\]\(\.\./(exercises/\w+\.ipynb)\)", sources[-1])
    assert exercises.startswith(f"exercises/{chapter.path.stem[:2]}_")
    for following in EVERY[number + 1 :][:1]:
        assert f"]({following.path.name})" in sources[-1]


def names_of(source: str) -> tuple[set[str], set[str]]:
    """The names that a cell sets, and those that it needs from other cells."""
    cell = symtable.symtable(source, "cell", "exec")

    def needed(table: symtable.SymbolTable) -> Iterator[str]:
        for name in table.get_symbols():
            if name.is_referenced() and (table is cell or name.is_global()):
                yield name.get_name()
        for inner in table.get_children():
            yield from needed(inner)

    own = {name.get_name() for name in cell.get_symbols() if name.is_assigned()}
    return own, set(needed(cell)) - own


@parametrized(EVERY)
def test_a_cell_finds_what_it_needs_whichever_cell_ran_last(chapter: Chapter) -> None:
    cells = [names_of(code) for code in chapter.sources("code") if not code.startswith("%")]
    needed = set[str]().union(*(names for _, names in cells))
    assert [name for name in needed if sum(name in own for own, _ in cells) > 1] == []


@parametrized([chapter for chapter in EVERY if chapter.path.stem[:3] in ("00_", "02_", "03_")])
def test_cells_are_short(chapter: Chapter) -> None:
    assert [c for c in chapter.sources("code") if len(c.splitlines()) > 17] == []


@pytest.mark.parametrize("name", RIGHT)
def test_every_option_of_the_guess_has_a_sentence_of_its_own(name: str) -> None:
    chapter = Chapter(name.partition("_")[0])
    text = "\n".join(chapter.sources("markdown"))
    assert re.findall(r"^- \*\*([A-Z])\*\*", text, re.M) == list("ABCD")
    check = chapter.code_with("my_guess).strip()")

    scope = {"np": np, "losses": {}, "x": torch.tensor(10),
             "result": dtlab.Result([1] * 4, 0.0, dtlab.Trace(4), ["x"] * 4)}

    def answer(guess: str) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(check, scope | {"my_guess": guess})
        return said.getvalue().splitlines()[0]

    right = RIGHT[name]
    verdicts = {letter: answer(letter) for letter in "ABCD"}
    assert len(set(verdicts.values())) == 4
    for letter, said in verdicts.items():
        assert said == answer(f" {letter.lower()} ")
        assert said.startswith("Yes: ") == (letter == right)
        assert letter == right or re.search(rf"\b{right}\b", said)
    assert answer("?") == answer("forty-two") == answer("")
    nothing = "Write a letter into the cell of section" if name in NEAR else f"It is {right}: "
    assert answer("?").startswith(f"No guess yet? {nothing}")
