"""The exercises in nbgrader's own hands: assignment generated, submission autograded, points."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nbgrader", reason="an instructor's tool: pip install 'dtlab[teach]'")

from nbgrader.api import Gradebook
from nbgrader.apps import NbGraderAPI
from nbgrader.validator import Validator
from traitlets.config import Config

from dtlab import ConfigError
from dtlab.grading.isolation import choose_sandbox
from dtlab.grading.nbgrader import use_sandbox

ROOT = Path(__file__).resolve().parents[2]
NAME = "00_welcome"
PARTLY_RIGHT = '''
def hello(comm):
    print("a print disturbs nobody")
    return comm.rank, comm.size, comm.rank - 1, comm.rank + 1  # forgets the circle
'''


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Iterator[Path]:
    """A course with one assignment; ada answers half of it, cyd all."""
    with pytest.MonkeyPatch.context() as patch:
        # nbgrader starts alembic by its bare name.
        bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        patch.setenv("PATH", bin_first)
        yield graded_course(tmp_path_factory)


def graded_course(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("course")
    source = root / "source" / "week1" / f"{NAME}.ipynb"
    source.parent.mkdir(parents=True)
    shutil.copy(ROOT / "solutions" / source.name, source)
    settings = Config()
    settings.CourseDirectory.root = str(root)
    use_sandbox(settings, best_sandbox())
    settings.ExecutePreprocessor.timeout = 120
    api = NbGraderAPI(config=settings)
    told = api.generate_assignment("week1")
    assert told["success"], told.get("log")
    for student, edit in (("ada", half), ("bo", nothing), ("cyd", all_of_it), ("eve", patches)):
        mine = root / "submitted" / student / "week1" / source.name
        mine.parent.mkdir(parents=True)
        notebook = json.loads((root / "release" / "week1" / source.name).read_text())
        edit(notebook, json.loads(source.read_text()))
        mine.write_text(json.dumps(notebook))
        told = api.autograde("week1", student)
        assert told["success"], told.get("log")
    return root


def best_sandbox() -> str:
    try:
        return choose_sandbox("bubblewrap")
    except ConfigError:
        return "none"


def by_id(notebook: dict) -> dict:
    cells = notebook["cells"]
    return {cell["metadata"].get("nbgrader", {}).get("grade_id"): cell for cell in cells}


def half(notebook: dict, source: dict) -> None:
    by_id(notebook)["hello-ranks"]["source"] = PARTLY_RIGHT
    # A learner who gives themselves the points gets the course's test back.
    by_id(notebook)["fix-deadlock-points"]["source"] = "4"


def nothing(notebook: dict, source: dict) -> None:
    pass


def patches(notebook: dict, source: dict) -> None:
    by_id(notebook)["hello-ranks"]["source"] = (
        "from dtlab.grading import report\n"
        "report.Report.points = property(lambda _: 8)\n"
        "def hello(comm):\n    return None\n")


def all_of_it(notebook: dict, source: dict) -> None:
    for grade_id in ("hello-ranks", "fix-deadlock"):
        by_id(notebook)[grade_id]["source"] = by_id(source)[grade_id]["source"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Object of type")  # nbgrader's way with its database
@pytest.mark.parametrize(("student", "points"), [("ada", 1), ("bo", 0), ("cyd", 8), ("eve", 0)])
def test_nbgrader_gives_the_points_that_check_gives(course, student, points):
    with Gradebook(f"sqlite:///{course}/gradebook.db") as gradebook:
        submission = gradebook.find_submission_notebook(NAME, "week1", student)
        assert (submission.score, submission.max_score) == (points, 8)


@pytest.mark.slow
def test_hidden_tests_are_not_handed_out(course):
    text = (course / "release" / "week1" / f"{NAME}.ipynb").read_text()
    assert "HIDDEN" not in text
    assert "seed" not in text
    assert "SOLUTION" not in text
    assert "NotImplementedError" in text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_table_stands_below_the_graded_cell(course):
    graded = course / "autograded" / "ada" / "week1" / f"{NAME}.ipynb"
    cell = by_id(json.loads(graded.read_text()))["hello-ranks-points"]
    text = json.dumps(cell["outputs"])
    assert "1 of 4 points" in text
    assert "".join(cell["outputs"][-1]["data"]["text/plain"]) == "1"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_solution_validates(course):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(course)
        told = Validator().validate(str(course / "source" / "week1" / f"{NAME}.ipynb"))
    assert "failed" not in told
    assert "error" not in told
