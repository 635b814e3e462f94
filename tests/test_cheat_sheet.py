"""The cheat sheet and the glossary: nothing is missing, and every name on them exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch.distributed as dist

from dtlab import collectives
from dtlab.collectives import ALGORITHMS
from dtlab.comm import Comm

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
SHEET = (NOTEBOOKS / "cheat_sheet.md").read_text()
OTHERS = SHEET[SHEET.index("## The same in other libraries") :]


def called(pattern: str) -> dict[str, list[str]]:
    """Name → names of its arguments, of the calls on the sheet."""
    return {name: [word for word in re.split(r"[,\s]+", words) if word.isidentifier()]
            for name, words in re.findall(pattern + r"(\w+)\(([^)]*)\)", SHEET)}


def test_the_sheet_has_every_method_of_a_communicator_with_its_arguments() -> None:
    methods = called(r"comm\.")
    assert set(methods) == {name for name, _ in inspect.getmembers(Comm, inspect.isfunction)
                            if not name.startswith("_")}
    for name in ("send", "recv", "sendrecv", "isend", "irecv", "wait_any", "split", "recv_object",
                 "accumulate_"):
        assert methods[name] == [*inspect.signature(getattr(Comm, name)).parameters][1:]


def test_the_sheet_has_every_collective_with_its_arguments() -> None:
    shown = dict(re.findall(r"`(\w+)\((comm[^)]*)\)`", SHEET))
    assert set(shown) == set(ALGORITHMS)
    for name, words in shown.items():
        parameters = [*inspect.signature(getattr(collectives, name)).parameters]
        assert words.split(", ") == [p for p in parameters
                                     if p not in ("algorithm", "out", "overwrite", "options")]


def test_torch_has_what_the_table_says() -> None:
    rows = [line.split("|")[2] for line in OTHERS.splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert len(names) > 15
    assert [name for name in names if not hasattr(dist, name)] == []


def test_every_row_names_all_five_libraries() -> None:
    rows = [line.strip("|").split(" | ") for line in OTHERS.splitlines() if line.startswith("| ")]
    assert [len(row) for row in rows] == [5] * len(rows)
    assert rows[0][-2:] == ["NCCL", "HCCL "]
    assert all("Hccl" in row[4] or "Stream" in row[4] or "–" in row[4] for row in rows[1:])
    for name in ("Ascend", "torch_npu", "mindspore.mint.distributed"):
        assert name in OTHERS


def test_the_glossary_is_in_order_and_names_chapters_that_exist() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| (\d\db?) \|$",
                      (NOTEBOOKS / "glossary.md").read_text(), re.M)
    words = [word for word, _ in rows][2:]  # after the Greek ones
    assert words == sorted(words, key=str.lower)
    for term, chapter in rows:
        (notebook,) = NOTEBOOKS.glob(f"{chapter}_*.ipynb")
        text = notebook.read_text().lower()
        for word in re.split(r", | \(", term.lower().rstrip(")")):
            assert word in text, f"{word} is not in chapter {chapter}"
