"""Reading a learner's notebook: finding its answers, and the course's notebook that it belongs to.

Only answers are taken from a learner: the solution cells, and definitions (def, class, import,
f = lambda …) in other cells, which answers may use. Tests come from the course's notebook.
"""

from __future__ import annotations

import ast
import json
import re
import stat
import warnings
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import dtlab
from dtlab.errors import ConfigError

SETUP = "setup"  # the tag of a cell that answers may rely on: imports
LARGEST_CELL = 100_000  # characters; one of the course has a twentieth
LARGEST_CODE = 1_000_000  # of all cells that are read for definitions


@dataclass
class SubmittedCell:
    """Code to execute. answers: the grade id of the solution cell; "" for any other cell."""

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
    cell_of: dict[str, str]  # function → the grade id of the cell that has to define it


def read_submitted(path: str | Path, solutions: str | Path | None = None) -> SubmittedNotebook:
    """Read a learner's notebook and find the course's notebook that it answers. Raises
    `ConfigError`, in one sentence, if there is no such file, if it isn't a notebook, or if no
    exercise of the course is in it."""
    path = Path(path)
    cells = _code_cells(read_notebook(path))
    sources = {file: _code_cells(read_notebook(file))
               for file in sorted(course_folder(solutions).glob("*.ipynb"))}
    chosen = {file: _chosen(cells, _solution_cells(source)) for file, source in sources.items()}
    best = max(sources, key=lambda file: len(chosen[file]), default=None)
    if best is None or not chosen[best]:
        raise ConfigError(
            f"{path}: no exercise of this course is in it; give a notebook that began as one of "
            f"exercises/"
        )
    source, wanted = sources[best], _solution_cells(sources[best])
    code = [SubmittedCell(cell.text) for cell in source if SETUP in cell.tags]
    code += _answers(cells, chosen[best], wanted)
    tests = [cell.text for cell in source if cell.mark.get("grade")]
    cell_of = {name: i for i, names in wanted.items() for name in names}
    return SubmittedNotebook(path, best, code, tests, cell_of)


def read_notebook(path: Path) -> dict[str, Any]:
    """The notebook in this file; `ConfigError` says what is wrong with it."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the notebooks in it: {path}/*.ipynb")
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe or a device could never end
            raise ConfigError(f"{path} is no ordinary file")
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a notebook in UTF-8: open it in JupyterLab, save it, and "
                          f"hand in that file") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    if not text.strip():
        raise ConfigError(f"{path} is empty: save the notebook again")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a notebook: {_what_it_is(text, error)}") from None
    if isinstance(raw, dict) and "worksheets" in raw:
        raise ConfigError(f"{path} is a notebook of format 3: open it in JupyterLab and save it")
    if not isinstance(raw, dict) or not isinstance(raw.get("cells"), list):
        raise ConfigError(f"{path} is not a notebook: it has no cells")
    return raw


def _what_it_is(text: str, error: Exception) -> str:
    """Explain why this is no JSON, in words for people who have handed it in."""
    if text.lstrip().startswith("<"):
        return "it is HTML, as exported for reading; hand in the .ipynb itself"
    if re.search(r"^(<{7}|>{7}) ", text, re.MULTILINE):
        return "git has left conflict marks (<<<<<<<) in it; resolve the conflict, and save again"
    if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data" and text[0] == "{":
        return f"line {error.lineno} goes on after its end; save it in JupyterLab, and hand that in"
    if isinstance(error, json.JSONDecodeError) and (
            error.pos >= len(text.rstrip()) - 1 or error.msg.startswith("Unterminated string")):
        return "its end is missing; save it and upload it again"
    if not text.lstrip().startswith("{"):
        return "it is another kind of file, whatever its name; hand in what JupyterLab has saved"
    return str(error)


def course_folder(given: str | Path | None) -> Path:
    """Find the folder of the course's own notebooks: `given`, or one beside the package, or in the
    current folder. Learners have no solutions; their exercises have the visible checks."""
    package = Path(dtlab.__file__).parent
    places = (package.parent, Path.cwd(), package / "course")
    candidates = [Path(given)] if given else [
        place / name for name in ("solutions", "exercises") for place in places]
    for folder in candidates:
        if any(folder.glob("*.ipynb")):
            return folder
    raise ConfigError(
        f"the course's own notebooks aren't in {candidates[0]}; say where the folder solutions/ is"
    )


# ---- answers -----------------------------------------------------------------------------------


class CodeCell(NamedTuple):
    """A code cell of a notebook, parsed once: a hostile one could take long."""

    text: str
    mark: dict[str, Any]  # nbgrader's
    tags: list[str]
    statements: list[ast.stmt]  # [] if the text is no Python, or too long

    @property
    def functions(self) -> set[str]:
        """The names of the functions that the cell defines."""
        return {s.name for s in self.statements if isinstance(s, ast.FunctionDef)}

    @property
    def written(self) -> set[str]:
        """The names of the functions that raise no NotImplementedError."""
        return {s.name for s in self.statements if isinstance(s, ast.FunctionDef) and not any(
            isinstance(line, ast.Raise) and "NotImplementedError" in (
                getattr(line.exc, "id", ""), getattr(getattr(line.exc, "func", None), "id", ""))
            for line in s.body)}

    def helpers(self, settled: Set[str]) -> str:
        """The statements that only define names, of which none is `settled`."""
        try:
            return "\n\n".join(ast.unparse(s) for s in self.statements
                               if (names := defined_names(s)) and not names & settled)
        except RecursionError:
            return ""


def defined_names(s: ast.stmt) -> set[str]:
    """The names that a statement defines, if it does nothing else: def, class, import, f = lambda …
    """
    if isinstance(s, (ast.FunctionDef, ast.ClassDef)):
        return {s.name}
    if isinstance(s, (ast.Import, ast.ImportFrom)):
        return {each.asname or each.name.split(".")[0] for each in s.names}
    value = s.value if isinstance(s, (ast.Assign, ast.AnnAssign)) else None
    made_by = ast.unparse(value.func).split(".")[-1] if isinstance(value, ast.Call) else ""
    return assigned_names(s) if made_by in ("namedtuple", "partial") or isinstance(
        value, (ast.Lambda, ast.Name, ast.Attribute)) else set()


def assigned_names(tree: ast.AST) -> set[str]:
    """The names that are assigned to anywhere in `tree`."""
    return {node.id for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _code_cells(notebook: dict[str, Any]) -> list[CodeCell]:
    cells, remaining = [], LARGEST_CODE
    for cell in notebook["cells"]:
        if not isinstance(cell, dict):
            continue
        source, metadata = cell.get("source"), cell.get("metadata")
        found = metadata if isinstance(metadata, dict) else {}
        mark, tags = found.get("nbgrader"), found.get("tags")
        mark = mark if isinstance(mark, dict) else {}
        if isinstance(source, (str, list)) and (  # M makes Markdown of an answer in JupyterLab
                cell.get("cell_type") == "code" or mark.get("solution")):
            text = source if isinstance(source, str) else "".join(map(str, source))
            remaining -= len(text)
            if remaining >= 0:
                text = _without_ipython(text)
            cells.append(CodeCell(text, mark, tags if isinstance(tags, list) else [],
                                  _parsed(text) if remaining >= 0 else []))
    return cells


def _solution_cells(source: list[CodeCell]) -> dict[str, set[str]]:
    """Map grade ids of a notebook of the course to the functions that their solutions define."""
    return {cell.mark["grade_id"]: cell.functions for cell in source if cell.mark.get("solution")}


def _chosen(cells: list[CodeCell], wanted: dict[str, set[str]]) -> dict[str, list[int]]:
    """Map each grade id to the learner's cells that answer it. A cell that JupyterLab has split or
    copied keeps its grade id. A new cell is found by the function that it defines, if the notebook
    has grade ids or checks at all. A stub doesn't count if another cell has the function written.
    """
    chosen, marks = {}, any(cell.mark for cell in cells)
    for grade_id, names in wanted.items():
        if not marks and not any(grade_id in cell.text for cell in cells):
            continue
        written = [i for i, cell in enumerate(cells) if names & cell.written]
        same_name = written or [i for i, cell in enumerate(cells) if names & cell.functions]
        marked = [i for i, cell in enumerate(cells) if cell.mark.get("grade_id") == grade_id
                  and (i in same_name or not names & cell.functions)]
        if marked or same_name:
            chosen[grade_id] = marked or same_name[-1:]
    return chosen


def _answers(cells: list[CodeCell], chosen: dict[str, list[int]], wanted: dict[str, set[str]]
             ) -> list[SubmittedCell]:
    """Return the cells to execute, in order. An answer in several cells takes the place of the
    last. Definitions in other cells don't count if a written answer defines the name. Each missing
    answer has a cell with an error, at the end."""
    settled = {name for grade_id, parts in chosen.items() for i in parts
               for name in wanted[grade_id] & cells[i].written}
    grade_ids = {parts[-1]: grade_id for grade_id, parts in chosen.items()}
    earlier = {i for parts in chosen.values() for i in parts[:-1]}
    found = []
    for i, cell in enumerate(cells):
        if i in grade_ids:
            text = "\n\n".join(cells[part].text for part in chosen[grade_ids[i]])
            long = f"the answer's cell has more than {LARGEST_CELL:,} characters"
            found.append(SubmittedCell("", grade_ids[i], long) if len(text) > LARGEST_CELL
                         else SubmittedCell(text, grade_ids[i]))
        elif i not in earlier and (helpers := cell.helpers(settled)):
            found.append(SubmittedCell(helpers))
    for grade_id in wanted.keys() - set(grade_ids.values()):
        found.append(SubmittedCell("", grade_id, "the answer's cell is not in the notebook"))
    return found


_IPYTHON = re.compile(r"^(\s*)(?:(?:\w+\s*=\s*)?[%!].*|\?.*|[\w.]+\?\??\s*$)")


def _without_ipython(code: str) -> str:
    """Return `code` without the lines that only IPython understands (%time, !pip, x = !ls,
    comm.send?), if it is Python without them."""
    if _parsed(code) or len(code) > LARGEST_CELL:
        return code
    lines = [re.sub(_IPYTHON, r"\1pass", line) for line in code.split("\n")]
    plain = "\n".join(lines)
    return plain if _parsed(plain) else code


def _parsed(code: str) -> list[ast.stmt]:
    if len(code) > LARGEST_CELL:  # it would take seconds, and gigabytes
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
