"""Notebooks that are not what was handed out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.gallery.attack import MARK, Attack

Notebook = dict[str, Any]
WRONG = "def hello(comm):\n    return None\n"


def cell_of(notebook: Notebook, grade_id: str) -> dict[str, Any]:
    """The cell with this mark."""
    return next(cell for cell in notebook["cells"]
                if cell["metadata"].get("nbgrader", {}).get("grade_id") == grade_id)


def code_cell(source: str) -> dict[str, Any]:
    """A cell of the learner's own."""
    return {"cell_type": "code", "metadata": {}, "source": source, "outputs": [],
            "execution_count": None, "id": "added"}


def edited(name: str, edit: Callable[[Notebook], Any]) -> Attack:
    """The notebook of chapter 00 with a wrong answer, and then `edit`."""
    return Attack(name, WRONG, edit=edit)


def _scores_itself(notebook: Notebook) -> None:
    cell_of(notebook, "hello-ranks-points")["source"] = "4"


def _checks_twice(notebook: Notebook) -> None:
    cell = cell_of(notebook, "hello-ranks-points")
    notebook["cells"] += [cell | {"source": "4"}, cell | {"source": "99", "id": "again"}]


def _points_marked(notebook: Notebook) -> None:
    mark = cell_of(notebook, "hello-ranks-points")["metadata"]["nbgrader"]
    mark |= {"points": 99, "solution": True, "grade": False}


def _no_tests(notebook: Notebook) -> None:
    notebook["cells"].remove(cell_of(notebook, "hello-ranks-points"))


def _marks_are_lists(notebook: Notebook) -> None:
    for cell in notebook["cells"]:
        cell["metadata"] = {"nbgrader": {"grade_id": [1], "solution": [1]}, "tags": None}


def _no_marks(notebook: Notebook) -> None:
    for cell in notebook["cells"]:
        cell["metadata"] = None


def _helpers_too_deep(notebook: Notebook) -> None:
    deep = "def helper():\n    return " + "-" * 20_000 + "1\n"
    notebook["cells"] += [code_cell(deep), code_cell("x = " + "(" * 5_000)]


def _odd_cells(notebook: Notebook) -> None:
    notebook["cells"] += [None, 3, {"cell_type": "code"}, {"cell_type": "code", "source": None},
                          {"cell_type": "code", "source": [None, 4], "metadata": 5}]


def _megabytes(notebook: Notebook) -> None:
    notebook["cells"] += [code_cell("def helper():\n    return '" + "x" * 3_000_000 + "'")]


def _many_megabytes(notebook: Notebook) -> None:
    notebook["cells"] += [code_cell("def helper():\n    return [" + "1," * 49_000 + "]")] * 180


def _commands(notebook: Notebook) -> None:
    cell_of(notebook, "hello-ranks")["source"] = f"!touch /tmp/{MARK}-shell\n{WRONG}"
    notebook["cells"] += [code_cell(f"%%bash\ntouch /tmp/{MARK}-shell")]


def _harm_at_once(notebook: Notebook) -> None:
    cell_of(notebook, "hello-ranks")["source"] = (
        f"import os\nos.system('touch /tmp/{MARK}-cell')\nos.kill(os.getppid(), 9)\n{WRONG}")


def _cell_without_end(notebook: Notebook) -> None:
    cell_of(notebook, "hello-ranks")["source"] = f"{WRONG}\nwhile True: pass"


def _cell_plays_for_time(notebook: Notebook) -> None:
    cell_of(notebook, "hello-ranks")["source"] = f"""{WRONG}
import gc, time
from dtlab.grading.frames import FrameSocket
mine = [x for x in gc.get_objects() if type(x) is FrameSocket]
while True:
    for s in mine: s.send("begin", cell=0)
    time.sleep(0.1)
"""


ATTACKS: tuple[Attack, ...] = (
    edited("the test's cell says 4", _scores_itself),
    edited("the test's cell is there three times", _checks_twice),
    edited("the marks promise 99 points", _points_marked),
    edited("the test's cell is gone", _no_tests),
    edited("marks are lists", _marks_are_lists),
    edited("metadata is null", _no_marks),
    edited("helpers nest too deep to be read", _helpers_too_deep),
    edited("cells are null, numbers and halves", _odd_cells),
    edited("a cell has megabytes", _megabytes),
    edited("cells have many megabytes together", _many_megabytes),
    edited("cells are commands of the shell", _commands),
    edited("a cell does harm when it is executed", _harm_at_once),
    edited("a cell never ends", _cell_without_end),
    edited("a cell says again and again that it begins", _cell_plays_for_time),
)
