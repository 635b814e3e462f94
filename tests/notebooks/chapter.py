"""A chapter, for the tests of what it says; its cells go by their names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
CHAPTERS = sorted(NOTEBOOKS.glob("*.ipynb"))


class Chapter:
    """By its number, "07" or "08b"."""

    def __init__(self, number: str):
        (self.path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
        self.cells = {cell.id: cell for cell in nbformat.read(self.path, as_version=4).cells}

    def sources(self, kind: str) -> list[str]:
        """Of all cells, "code" or "markdown"."""
        return [cell.source for cell in self.cells.values() if cell.cell_type == kind]

    @property
    def prose(self) -> str:
        """On one line, without emphasis."""
        return re.sub(r"\s+", " ", "\n".join(self.sources("markdown")).replace("*", ""))

    def source(self, name: str) -> str:
        return str(self.cells[name].source)

    def code_with(self, words: str) -> str:
        """The one code cell that holds `words`."""
        (source,) = [source for source in self.sources("code") if words in source]
        return source

    def printed(self, name: str) -> str:
        """What a cell prints, pictures in words. Only for cells whose output nbval compares."""
        cell = self.cells[name]
        assert "nbval-ignore-output" not in cell.metadata.get("tags", [])
        return "".join(out.get("text") or out.get("data", {}).get("text/plain", "")
                       for out in cell.outputs)

    def defined(self, *names: str, **space: Any) -> dict[str, Any]:
        """What these cells define."""
        space["__name__"] = "__main__"
        for name in names:
            exec(self.source(name), space)
        return space
