"""The prose of a chapter, for the tests of its claims: test_claims_07.py reads notebooks/07_*."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.fixture(scope="module")
def prose(request: pytest.FixtureRequest) -> str:
    """The text of the chapter, line breaks and emphasis removed."""
    (path,) = NOTEBOOKS.glob(f"{request.path.stem.removeprefix('test_claims_')}_*.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.sub(r"\s+", " ", text.replace("*", ""))
