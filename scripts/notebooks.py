"""Execute notebooks and write them back without what differs from one run to the next.

    python scripts/notebooks.py [--check] [PATH …]

Without paths: every chapter in notebooks/ and every notebook in solutions/. A chapter keeps its
outputs, so that it reads well anywhere; a solution is executed to prove that it runs, and kept
without outputs, so that its history shows what people wrote. `--check` writes nothing and fails
if a file is not in the form that this script gives it.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 120  # for one cell; a chapter should take under 40 s in all
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def execute(path: Path) -> NotebookNode:
    """The notebook, run from top to bottom in a fresh kernel, in its own folder."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", resources=where,
                   coalesce_streams=True, store_widget_state=False, record_timing=False).execute()
    return notebook


def normalise(notebook: NotebookNode, keep_outputs: bool) -> NotebookNode:
    """The notebook in the form that is committed; changed in place and returned."""
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = NotebookNode(kernelspec=KERNEL, language_info={"name": "python"})
    for number, cell in enumerate(notebook.cells):
        if not re.fullmatch(r"[a-z0-9-]+", cell.get("id", "")) or looks_random(cell.id):
            cell.id = f"cell-{number:03}"
        for volatile in ("execution", "collapsed", "scrolled", "ExecuteTime", "trusted"):
            cell.metadata.pop(volatile, None)
        if cell.cell_type == "code":
            cell.outputs = [tidy(output) for output in cell.outputs] if keep_outputs else []
            cell.execution_count = cell.execution_count if keep_outputs else None
    return notebook


def looks_random(cell_id: str) -> bool:
    """Did an editor draw this id? Then it says nothing, and would differ the next time."""
    return re.fullmatch(r"[0-9a-f]{8}(-?[0-9a-f]{4,12})*", cell_id) is not None


def tidy(output: NotebookNode) -> NotebookNode:
    """An output without the number of a widget that has ended, and without this clone's path."""
    data = output.get("data", {})
    if WIDGET_VIEW in data:
        del data[WIDGET_VIEW]  # its still picture stays
    output.get("metadata", {}).pop(WIDGET_VIEW, None)
    if "text" in output:
        output.text = output.text.replace(str(ROOT), "~/dtlab")
    return output


def text_of(notebook: NotebookNode) -> str:
    nbformat.validate(notebook)
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def is_normal(path: Path, keep_outputs: bool) -> bool:
    """Is the file what `normalise` would write, run or not?"""
    notebook = nbformat.read(path, as_version=4)
    return path.read_text() == text_of(normalise(notebook, keep_outputs))


def update(path: Path, keep_outputs: bool) -> bool:
    """Execute one notebook and write it back. False, and a word on stderr, if a cell fails."""
    begun = time.perf_counter()
    try:
        notebook = execute(path)
    except CellExecutionError as error:
        print(f"{named(path)}: a cell failed\n{error}", file=sys.stderr)
        return False
    path.write_text(text_of(normalise(notebook, keep_outputs)))
    print(f"{named(path)}: {time.perf_counter() - begun:.0f} s")
    return True


def named(path: Path) -> str:
    """The path as people know it: from the top of the repository, if it is in there."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one differs")
    asked = parser.parse_args()
    everything = sorted([*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("solutions/*.ipynb")])
    ok = True
    for path in [p.resolve() for p in asked.paths] or everything:
        keep_outputs = path.parent.name != "solutions"
        if not asked.check:
            ok &= update(path, keep_outputs)
        elif not is_normal(path, keep_outputs):
            print(f"{named(path)} is not as `make notebooks` writes it")
            ok = False
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
