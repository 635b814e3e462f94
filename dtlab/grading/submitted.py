"""Reading a learner's notebook: what in it is an answer, and to which of the course's notebooks.

Only answers are taken from a learner: the solution cells, and definitions (def, class, import)
from other cells, as an answer may use a helper. Tests come from the course's own notebook.
"""

from __future__ import annotations

import ast
import json
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dtlab
from dtlab.errors import ConfigError

SETUP = "setup"  # the tag of a cell that answers may rely on: imports


@dataclass
class SubmittedCell:
    """Code to execute. `answers`: the grade id of the solution cell it is from, "" if from none."""

    code: str
    answers: str = ""
    error: str = ""  # why it has no code


@dataclass
class SubmittedNotebook:
    """A learner's notebook, ready to be graded."""

    path: Path
    source: Path  # the course's notebook
    cells: list[SubmittedCell]
    tests: list[str]  # the course's graded cells, with hidden tests
    cell_of: dict[str, str]  # function → the grade id of the cell that shall define it


def read_submitted(path: str | Path, solutions: str | Path | None = None) -> SubmittedNotebook:
    """Read a learner's notebook and find the course's notebook that it answers.

    Raises `ConfigError`, in one sentence, if there is no such file, if it isn't a notebook, or if
    no exercise of the course is in it.
    """
    path = Path(path)
    notebook = read_notebook(path)
    folder = course_folder(solutions)
    sources = {file: read_notebook(file) for file in sorted(folder.glob("*.ipynb"))}
    shared = {file: len(_answered(notebook, source)) for file, source in sources.items()}
    best = max(shared, key=lambda file: shared[file], default=None)
    if best is None or not shared[best]:
        raise ConfigError(
            f"{path}: no exercise of this course is in it; give a notebook that began as one of "
            f"exercises/"
        )
    source = sources[best]
    cells = [SubmittedCell(_text(cell)) for cell in _code_cells(source) if SETUP in _tags(cell)]
    cells += _answers(notebook, source)
    tests = [_text(cell) for cell in _code_cells(source) if _mark(cell).get("grade")]
    cell_of = {name: i for i, names in _solution_cells(source).items() for name in names}
    return SubmittedNotebook(path, best, cells, tests, cell_of)


def read_notebook(path: Path) -> dict[str, Any]:
    """The notebook in this file; `ConfigError` says what is wrong with it."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the notebooks in it: {path}/*.ipynb")
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe or a device could never end
            raise ConfigError(f"{path} is no ordinary file")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    if not text.strip():
        raise ConfigError(f"{path} is empty: save the notebook again")
    try:
        raw = json.loads(text)
        if not isinstance(raw, dict) or not isinstance(raw.get("cells"), list):
            raise ValueError("it has no cells")
        return raw
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a notebook: {error}") from None


def course_folder(given: str | Path | None) -> Path:
    """Where the course's own notebooks are: in `given`, beside the package, or beside you. Learners
    have no solutions, but the exercises, with the checks that they may see."""
    places = (Path(dtlab.__file__).parent.parent, Path.cwd())
    candidates = [Path(given)] if given else [
        place / name for name in ("solutions", "exercises") for place in places]
    for folder in candidates:
        if any(folder.glob("*.ipynb")):
            return folder
    raise ConfigError(
        f"the course's own notebooks aren't in {candidates[0]}; say where the folder solutions/ is"
    )


# ---- answers -----------------------------------------------------------------------------------


def _answered(notebook: Any, source: Any) -> set[str]:
    """The solution cells of `source` that `notebook` answers."""
    return {cell.answers for cell in _answers(notebook, source) if cell.answers and cell.code}


def _answers(notebook: Any, source: Any) -> list[SubmittedCell]:
    """The cells to execute, in the order of the notebook; at the end, one for each answer that is
    missing. A copied or re-made cell is known by the function that it defines."""
    wanted = _solution_cells(source)
    cells = _code_cells(notebook)
    marked = {str(_mark(cell).get("grade_id")): cell for cell in cells}
    chosen: dict[int, str] = {}  # id() of the learner's cell → grade id
    for grade_id, names in wanted.items():
        same_name = [cell for cell in cells if names & _defined(_text(cell))]
        cell = marked.get(grade_id) or (same_name[-1] if same_name else None)
        if cell is not None:
            chosen[id(cell)] = grade_id
    found = []
    for cell in cells:
        if id(cell) in chosen:
            found.append(SubmittedCell(_text(cell), chosen[id(cell)]))
        elif helpers := _definitions(_text(cell)):
            found.append(SubmittedCell(helpers))
    for grade_id in wanted.keys() - set(chosen.values()):
        found.append(SubmittedCell("", grade_id, "the answer's cell is not in the notebook"))
    return found


def _solution_cells(source: Any) -> dict[str, set[str]]:
    """Of one of the course's notebooks: grade id → the functions that its solution defines."""
    return {
        _mark(cell)["grade_id"]: _defined(_text(cell))
        for cell in _code_cells(source)
        if _mark(cell).get("solution")
    }


def _code_cells(notebook: Any) -> list[Any]:
    return [c for c in notebook["cells"] if isinstance(c, dict) and c.get("cell_type") == "code"
            and isinstance(c.get("source"), (str, list))]


def _text(cell: Any) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(map(str, source))


def _metadata(cell: Any) -> dict[str, Any]:
    metadata = cell.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _mark(cell: Any) -> dict[str, Any]:
    """nbgrader's metadata of a cell."""
    mark = _metadata(cell).get("nbgrader")
    return mark if isinstance(mark, dict) else {}


def _tags(cell: Any) -> list[str]:
    tags = _metadata(cell).get("tags")
    return tags if isinstance(tags, list) else []


def _parsed(code: str) -> list[ast.stmt]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _defined(code: str) -> set[str]:
    """The functions that `code` defines."""
    return {s.name for s in _parsed(code) if isinstance(s, ast.FunctionDef)}


def _definitions(code: str) -> str:
    """The statements of `code` that only define something."""
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    try:
        return "\n\n".join(ast.unparse(s) for s in _parsed(code) if isinstance(s, kinds))
    except RecursionError:
        return ""
