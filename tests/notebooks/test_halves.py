"""Chapters that have a second half: each half is a chapter of its own, and every answer counts."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
RIGHT = {"01_why_distribute": "D", "04_collectives": "C", "04b_everyone_to_everyone": "C",
         "05_all_reduce": "C",
         "05b_fewer_rounds": "C", "09_server_dies": "D", "09b_cut_off": "B",
         "10_data_parallel": "C", "12_pipelines": "A",
         "13_zero": "B"}


def cells(name: str, kind: str) -> list[str]:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


@pytest.mark.parametrize("name", RIGHT)
def test_it_is_built_as_the_readme_of_the_notebooks_says(name: str) -> None:
    text = "\n".join(cells(name, "markdown"))
    number = name.partition("_")[0]
    order = [r"^# ", rf"^\*Chapter {number}\. Before it: ", r"^\*\*The question\.\*\*",
             r"Your guess$", r"What breaks, and why$", r"Now you$", r"^## Further reading$"]
    starts = [place.start() for pattern in order if (place := re.search(pattern, text, re.M))]
    assert len(starts) == len(order)
    assert starts == sorted(starts)
    numbers = [int(n) for n in re.findall(r"^## (\d+)\. ", text, flags=re.M)]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("name", RIGHT)
def test_links_lead_somewhere_and_to_the_glossary_and_the_cheat_sheet(name: str) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", "\n".join(cells(name, "markdown")))
    assert [link for link in links if not (NOTEBOOKS / link).exists()] == []
    assert {"glossary.md", "cheat_sheet.md"} <= set(links)


@pytest.mark.parametrize("name", RIGHT)
def test_every_option_of_the_guess_has_a_sentence_of_its_own(name: str) -> None:
    text = "\n".join(cells(name, "markdown"))
    assert re.findall(r"^- \*\*([A-Z])\*\*", text, re.M) == list("ABCD")
    (check,) = [source for source in cells(name, "code") if "my_guess).strip()" in source]

    def answer(guess: str) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(check, {"my_guess": guess})
        return said.getvalue()

    right = RIGHT[name]
    verdicts = {letter: answer(letter) for letter in "ABCD"}
    reasons = {said.rpartition(". ")[0] for said in verdicts.values()}
    assert len(reasons) == 4
    for letter, said in verdicts.items():
        assert said == answer(f" {letter.lower()} ")
        assert said.startswith("Yes: ") == (letter == right)
        assert letter == right or re.search(rf"\b{right}\b", said)
    assert answer("?") == answer("forty-two") == answer("")
    assert answer("?").startswith(f"No guess yet? It is {right}: ")
