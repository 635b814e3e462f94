"""The scripts behind `make notebooks` and `make exercises`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parent.parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


notebooks, exercises = load("notebooks"), load("exercises")


@pytest.fixture
def chapter(tmp_path: Path) -> Path:
    path = tmp_path / "notebooks" / "00_test.ipynb"
    path.parent.mkdir()
    widget = "import ipywidgets\nipywidgets.IntSlider(value=3)"
    cells = [new_markdown_cell("# A title"), new_code_cell("for i in range(3):\n    print(i)"),
             new_code_cell(widget), new_code_cell("6 * 7")]
    for cell in cells:
        cell.metadata["ExecuteTime"] = {"start_time": "2026"}
    nbformat.write(new_notebook(cells=cells, metadata={"widgets": {"state": {}}}), path)
    return path


def test_a_chapter_is_executed_and_written_without_what_differs(chapter: Path) -> None:
    assert notebooks.update(chapter, keep_outputs=True)
    first = chapter.read_text()
    for volatile in ("model_id", "ExecuteTime", "iopub", "widget-state", "3.11"):
        assert volatile not in first
    made = nbformat.read(chapter, as_version=4)
    assert made.cells[1].outputs[0].text == "0\n1\n2\n"
    assert made.cells[3].outputs[0].data["text/plain"] == "42"
    assert [cell.id for cell in made.cells] == [f"cell-{n:03}" for n in range(4)]
    assert notebooks.is_normal(chapter, keep_outputs=True)
    assert notebooks.update(chapter, keep_outputs=True)
    assert chapter.read_text() == first


def test_a_solution_is_kept_without_outputs(chapter: Path) -> None:
    assert notebooks.update(chapter, keep_outputs=False)
    made = nbformat.read(chapter, as_version=4)
    assert all(cell.outputs == [] and cell.execution_count is None for cell in made.cells[1:])


def test_ids_that_people_gave_are_kept(chapter: Path) -> None:
    notebook = nbformat.read(chapter, as_version=4)
    notebook.cells[0].id = "the-title"
    notebook.cells[1].id = "ring-all-reduce"
    notebook.cells[2].id = "3f2a9c1e"
    ids = [cell.id for cell in notebooks.normalise(notebook, keep_outputs=True).cells]
    assert ids[:3] == ["the-title", "ring-all-reduce", "cell-002"]


def test_a_cell_that_fails_leaves_the_file_as_it_was(
    chapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = nbformat.read(chapter, as_version=4)
    notebook.cells[1].source = "1 / 0"
    nbformat.write(notebook, chapter)
    before = chapter.read_text()
    assert not notebooks.update(chapter, keep_outputs=True)
    assert chapter.read_text() == before
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.fixture
def solution(tmp_path: Path) -> Path:
    def graded(name: str, **flags: object) -> dict[str, object]:
        usual = {"grade": False, "solution": False, "locked": False, "schema_version": 3,
                 "task": False}
        return {"nbgrader": usual | {"grade_id": name} | flags}

    answer = "def f(x):\n    ### BEGIN SOLUTION\n    return x + 1\n    ### END SOLUTION"
    test = "assert f(1) == 2\n### BEGIN HIDDEN TESTS\nassert f(41) == 42\n### END HIDDEN TESTS"
    path = tmp_path / "00_test.ipynb"
    nbformat.write(new_notebook(cells=[
        new_markdown_cell("Write `f`.", id="task"),
        new_code_cell(answer, id="answer", metadata=graded("f", solution=True)),
        new_code_cell(test, id="test",
                      metadata=graded("test-f", grade=True, points=2, locked=True)),
    ]), path)
    return path


def test_an_exercise_has_neither_solutions_nor_hidden_tests(solution: Path) -> None:
    exercise = nbformat.reads(exercises.exercise_from(solution), as_version=4)
    _, answer, test = exercise.cells
    assert answer.source == "def f(x):\n    # YOUR CODE HERE\n    raise NotImplementedError()"
    assert test.source == "assert f(1) == 2"
    assert test.metadata.nbgrader.points == 2
    assert test.metadata.nbgrader.locked is True
    assert test.metadata.editable is False


def test_exercises_have_not_drifted_from_their_solutions(tmp_path: Path) -> None:
    solutions = sorted((ROOT / "solutions").glob("*.ipynb"))
    assert solutions
    for path in solutions:
        made = (ROOT / "exercises" / path.name).read_text()
        assert made == exercises.exercise_from(path), f"{path.name}: run `make exercises`"
    names = {path.name for path in (ROOT / "exercises").glob("*.ipynb")}
    assert names == {path.name for path in solutions}
