"""Whole notebooks: answers are found, hostile cells are survived, bad files get one sentence."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import re
import sys
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch

from dtlab import ConfigError, DtlabError, run
from dtlab.grading import cell_executor, notebook
from dtlab.grading import grade_notebook as grade_in_sandbox
from dtlab.grading.case import Case, Outcome
from dtlab.grading.class_grading import grade_hand_ins
from dtlab.grading.class_report import class_table, to_csv
from dtlab.grading.exercise import Check, Verdict
from dtlab.grading.judge import prepare_to_fork, try_all
from dtlab.grading.notebook import grade_notebooks
from dtlab.grading.rank_server import RankServer
from dtlab.grading.submissions import find_each
from dtlab.grading.submitted import SubmittedCell, read_submitted

ROOT = Path(__file__).resolve().parents[2]
grade_notebook = partial(grade_in_sandbox, sandbox="none")
NOTEBOOKS = sorted(path.name for path in (ROOT / "solutions").glob("*.ipynb"))


def load(folder: str, name: str) -> dict:
    return json.loads((ROOT / folder / name).read_text())


def marked(notebook: dict, grade_id: str) -> dict:
    for cell in notebook["cells"]:
        if cell["metadata"].get("nbgrader", {}).get("grade_id") == grade_id:
            return cell
    raise KeyError(grade_id)


@pytest.fixture
def submit(tmp_path):
    """Writes a notebook as a learner would hand it in, and grades it."""

    def save_and_grade(notebook: dict, name: str = "mine.ipynb"):
        path = tmp_path / name
        path.write_text(json.dumps(notebook))
        return grade_notebook(path)

    return save_and_grade


@pytest.fixture
def welcome() -> dict:
    """Chapter 00 with both answers right."""
    return copy.deepcopy(load("solutions", "00_welcome.ipynb"))


def code_cell(source: str) -> dict:
    return {"cell_type": "code", "metadata": {}, "source": source, "outputs": [],
            "execution_count": None, "id": "extra"}


def points(report) -> dict:
    return {each.exercise: each.points for each in report.exercises}


@pytest.fixture(scope="module")
def graded() -> dict:
    """The reports on the course's notebooks: ("solutions" or "exercises", name) → report."""
    places = [(folder, name) for folder in ("solutions", "exercises") for name in NOTEBOOKS]
    reports = grade_notebooks([ROOT / folder / name for folder, name in places], sandbox="none")
    return dict(zip(places, reports, strict=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_solutions_get_all_points_and_the_untouched_exercises_none(name, graded):
    report, untouched = graded["solutions", name], graded["exercises", name]
    assert report.points == report.max_points == untouched.max_points > 0, str(report)
    assert untouched.points == 0
    for each in untouched.exercises:
        assert "Not written yet" in each.hints[0]


def test_the_report_says_the_same_as_text_and_as_a_dictionary(welcome, submit):
    report = submit(welcome)
    told = json.loads(json.dumps(report.to_dict()))
    assert (told["points"], told["max_points"], told["error"]) == (8, 8, "")
    assert [each["exercise"] for each in told["exercises"]] == ["hello-ranks", "fix-deadlock"]
    assert "8 of 8 points" in report.to_text()


# ---- what counts -------------------------------------------------------------------------------


def test_tests_come_from_the_course_not_from_the_learner(welcome, submit):
    marked(welcome, "hello-ranks")["source"] = "def hello(comm):\n    return 1"
    marked(welcome, "hello-ranks-points")["source"] = "99"
    welcome["cells"].remove(marked(welcome, "fix-deadlock-points"))
    assert points(submit(welcome)) == {"hello-ranks": 0, "fix-deadlock": 4}


def test_patching_the_grader_in_the_notebook_changes_nothing(welcome, submit):
    marked(welcome, "hello-ranks")["source"] = (
        "import dtlab.grading.learner_check, dtlab.grading.exercise as e\n"
        "dtlab.grading.learner_check.check = dtlab.check = None\n"
        "e.verdict_of = lambda *a: None\n"
        "def hello(comm):\n    return None\n"
    )
    assert points(submit(welcome)) == {"hello-ranks": 0, "fix-deadlock": 4}


def test_helpers_in_other_cells_may_be_used(welcome, submit):
    marked(welcome, "hello-ranks")["source"] = (
        "def hello(comm):\n"
        "    return comm.rank, comm.size, beside(comm, -1), beside(comm, math.ceil(0.5))\n"
    )
    welcome["cells"].insert(1, code_cell(
        "import not_installed\nimport functools, math\n\n"
        "@functools.cache\ndef mod(a, p):\n    return a % p\n\n"
        "Pair = collections.namedtuple('Pair', 'a p')\nmodulo = lambda pair: mod(*pair)\n"
        "import collections\nPair = collections.namedtuple('Pair', 'a p')\n"
        "def beside(comm, k):\n    return modulo(Pair(comm.rank + k, comm.size))\n\n1 / 0"
    ))
    assert points(submit(welcome)) == {"hello-ranks": 4, "fix-deadlock": 4}


def test_of_two_functions_of_a_name_the_one_in_the_answers_cell_counts_once_it_is_written(
        welcome, submit):
    answer = marked(welcome, "hello-ranks")
    right = "".join(answer["source"])
    for here, below in ((f"raise ValueError\n{right}", "def hello(comm):\n    return 1"),
                        (f"from __future__ import annotations\n{right}"
                         .replace("Comm", "NotImported", 1), "hello = math.sin"),
                        ("def hello(comm):\n    raise NotImplementedError", right),
                        (right.replace(":\n", ":\n    if not comm.size:\n        raise "
                                       "NotImplementedError\n", 1), "hello = math.sin")):
        answer["source"] = here
        welcome["cells"].append(code_cell(f"import math\n{below}"))
        assert points(submit(welcome)) == {"hello-ranks": 4, "fix-deadlock": 4}


def test_an_answer_is_found_by_its_function_when_the_marks_are_lost(welcome, submit):
    for cell in welcome["cells"]:
        cell["metadata"] = {}
    assert points(submit(welcome)) == {"hello-ranks": 4, "fix-deadlock": 4}


def test_a_stub_beside_the_answer_and_an_answer_that_became_markdown_do_not_matter(welcome, submit):
    answer = marked(welcome, "hello-ranks")
    stub = copy.deepcopy(answer) | {"source": "def hello(comm):\n    raise NotImplementedError"}
    welcome["cells"].insert(welcome["cells"].index(answer) + 1, stub)
    other = marked(welcome, "fix-deadlock")
    other["cell_type"] = "markdown"
    assert points(submit(welcome)) == {"hello-ranks": 4, "fix-deadlock": 4}


@pytest.mark.parametrize("chapter", sorted((ROOT / "notebooks").glob("*.ipynb")),
                         ids=lambda path: path.stem)
def test_a_chapter_is_taken_for_no_exercise_though_functions_have_the_same_names(chapter):
    with pytest.raises(ConfigError, match="no exercise of this course"):
        read_submitted(chapter, ROOT / "solutions")


def test_the_name_of_the_file_does_not_matter(welcome, submit):
    assert submit(welcome, "final (2) really.ipynb").points == 8


def test_output_cells_and_sources_as_lists_are_fine(welcome, submit):
    for cell in welcome["cells"]:
        cell["source"] = cell["source"] if isinstance(cell["source"], list) else [cell["source"]]
        if cell["cell_type"] == "code":
            cell["outputs"] = [{"output_type": "stream", "name": "stderr", "text": "noise"}]
    assert submit(welcome).points == 8


def test_what_passed_on_hidden_inputs_tells_bounds_and_no_counts(graded):
    (report,) = [each for each in graded["solutions", "05_all_reduce.ipynb"].exercises
                 if each.exercise == "ring-all-reduce"]
    for row in report.rows:
        assert (row.actual, row.passed) == ("right", True)
        assert re.fullmatch("(≤ [0-9,]+)?", row.nbytes)
        assert re.fullmatch("(≤ [0-9,]+)?", row.rounds)
    assert any(row.nbytes for row in report.rows)


# ---- limits -------------------------------------------------------------------------------------


def test_cells_that_nap_have_one_limit_in_all():
    def judge(comm):
        prepare_to_fork()
        cell_executor.CELLS_LIMIT_S = 1.0
        cells = [SubmittedCell("import time; time.sleep(0.7)", f"c{n}") for n in range(9)]
        with RankServer("none") as server:
            began = time.monotonic()
            return cell_executor.execute_cells(server, cells, []), time.monotonic() - began

    executed, took_s = run(judge, ranks=1, trace=False, echo=False).values[0]
    assert set(executed.troubles.values()) == {"the cells had not ended after 1 s"}
    assert took_s < 0.7 * 9  # all naps together, which a starved process may take a part of


def _tried(until_s, wrong):
    """Try ten cases whose ranks return a tensor each: how many were tried, how many ranks' tensors
    were alive at once, and what is said of the last case."""
    alive, most, tried = weakref.WeakSet(), 0, 0

    def run_case(case):
        nonlocal most, tried
        tensors = [torch.empty(1000) for _ in range(2)]
        alive.update(tensors)
        most, tried = max(most, len(alive)), tried + 1
        return Outcome(tensors, [(), ()])

    cases = [Case(str(n), [(), ()]) for n in range(10)]
    check = Check("a check", 1, "", cases, lambda case, outcome: Verdict(
        not wrong, "", "", evidence=outcome.values if wrong else None))
    trials = try_all([check], run_case, until_s)
    return tried, most, trials["a check"][-1].outcome.failure


@pytest.mark.parametrize("wrong", [False, True])
def test_what_an_answer_returns_is_judged_and_let_go(wrong):
    """But for the first that is wrong, of which a clue is looked for."""
    assert _tried(math.inf, wrong) == (10, 4 if wrong else 2, None)


def test_once_the_time_of_a_hand_in_is_over_no_case_is_tried():
    tried, _, failure = _tried(0.0, False)
    assert tried == 1
    assert failure.message == "the cases before took all the time that there is for a hand-in"


# ---- one bad answer does not spoil the others --------------------------------------------------


@pytest.mark.parametrize(("source", "told"), [
    ("while True: pass", "had not ended"),
    ("import os; os._exit(3)", "exit code 3"),
    ("raise ValueError('no')", "ValueError: no"),
    ("import sys; sys.exit()", "SystemExit"),
    ("def hello(comm:\n", "SyntaxError"),
    ("%pip install torch", "no cell defines it"),
    ("hello = 3", "no cell defines it"),
    ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
    ("print('x' * 10**8)", "no cell defines it"),
    ("", "no cell defines it"),
    ("input()", "EOFError"),
    ("numbers = (n for n in [1])\ndef hello(comm): return next(numbers)",
     "hello can't be sent to the processes that try it (cannot pickle 'generator'"),
])
def test_a_bad_cell_is_named_and_the_others_count(welcome, submit, source, told):
    marked(welcome, "hello-ranks")["source"] = source
    report = submit(welcome)
    assert points(report) == {"hello-ranks": 0, "fix-deadlock": 4}
    assert told in report.exercises[0].hints[0]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has libseccomp")
def test_a_cell_can_not_kill_what_forked_it(welcome, submit):
    marked(welcome, "hello-ranks")["source"] = "import os; os.kill(os.getppid(), 9)"
    report = submit(welcome)
    assert points(report) == {"hello-ranks": 0, "fix-deadlock": 4}
    assert "PermissionError" in report.exercises[0].hints[0]


def test_a_missing_answer_is_named(welcome, submit):
    welcome["cells"].remove(marked(welcome, "hello-ranks"))
    report = submit(welcome)
    assert points(report) == {"hello-ranks": 0, "fix-deadlock": 4}
    assert "not in the notebook" in report.exercises[0].hints[0]


def test_a_traceback_shows_the_line_of_the_cell(welcome, submit):
    marked(welcome, "hello-ranks")["source"] = "def hello(comm):\n    return comm.rank / 0\n"
    report = submit(welcome).exercises[0]
    assert "return comm.rank / 0" in report.details
    assert "line 2" in report.details


# ---- bad files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("content", "told"), [
    (None, "no such file"),
    ("", "is empty"),
    ("  \n", "is empty"),
    ("{", "is not a notebook"),
    ("[1, 2]", "is not a notebook"),
    ('{"a": 1}', "is not a notebook"),
    ('{"cells": 3}', "is not a notebook"),
    ("[" * 100_000, "is not a notebook"),
    ("\x00\x01", "is not a notebook"),
    ("PK\x03\x04", "another kind of file"),
    ("<!DOCTYPE html>\n<html></html>", "it is HTML, as exported"),
    ('{\n "cells": [\n<<<<<<< HEAD\n  {}\n=======\n  {}\n>>>>>>> theirs\n]}', "conflict marks"),
    ('{"cells": [{"cell_type": "code", "source": "def hel', "its end is missing"),
    ('{"cells": [{"cell_type": "code"}', "its end is missing"),
    ('{"cells": []},', "line 1 goes on after its end"),
    (json.dumps({"nbformat": 3, "worksheets": [{"cells": []}]}), "a notebook of format 3"),
    (json.dumps({"cells": []}), "no exercise of this course"),
    (json.dumps({"cells": [None, 3, {"cell_type": "code"}, {"cell_type": "code", "source": 4},
                           {"cell_type": "code", "source": "x = 1", "metadata": 5}]}),
     "no exercise of this course"),
    (json.dumps({"cells": [{"cell_type": "code", "source": "def mine(): pass", "metadata": {}}]}),
     "no exercise of this course"),
])
def test_a_bad_file_gets_one_clear_sentence(tmp_path, content, told):
    path = tmp_path / "bad.ipynb"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=told) as error:
        grade_notebook(path)
    assert "bad.ipynb" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_and_bytes_that_are_no_text_get_a_sentence_too(tmp_path):
    with pytest.raises(ConfigError, match="is a folder"):
        grade_notebook(tmp_path)
    for number, encoding in enumerate(("utf-16", "gb18030")):
        path = tmp_path / f"{number}.ipynb"
        path.write_bytes(json.dumps({"cells": ["你好"]}, ensure_ascii=False).encode(encoding))
        with pytest.raises(ConfigError, match="is not a notebook in UTF-8: open it in JupyterLab"):
            grade_notebook(path)


def test_a_byte_order_mark_is_borne(tmp_path, welcome):
    path = tmp_path / "mine.ipynb"
    path.write_bytes(json.dumps(welcome).encode("utf-8-sig"))
    assert grade_notebook(path).points == 8


@pytest.mark.parametrize("lines", ["%%time\n", "!pip install -q torch\n%matplotlib inline\n",
                                   "if True:\n    %time\n",
                                   "hello?\n?hello\ndtlab.run??\nfiles = !ls\n"])
def test_lines_for_ipython_are_left_out(welcome, submit, lines):
    answer = marked(welcome, "hello-ranks")
    answer["source"] = lines + "".join(answer["source"])
    helper = code_cell(lines + "def unused():\n    pass")
    welcome["cells"].insert(1, helper)
    assert points(submit(welcome))["hello-ranks"] == 4


def test_an_answer_split_over_two_cells_is_one(welcome, submit):
    answer = marked(welcome, "hello-ranks")
    first = copy.deepcopy(answer) | {"source": "ONE = 1\n\n\ndef of(comm, n):\n"
                                               "    return (comm.rank + n) % comm.size"}
    answer["source"] = ("def hello(comm):\n"
                        "    return comm.rank, comm.size, of(comm, -ONE), of(comm, ONE)")
    welcome["cells"].insert(welcome["cells"].index(answer), first)
    assert points(submit(welcome))["hello-ranks"] == 4


def test_missing_solutions_are_explained(tmp_path):
    with pytest.raises(ConfigError, match="solutions"):
        grade_notebook(ROOT / "exercises" / NOTEBOOKS[0], solutions=tmp_path)


# ---- a class -----------------------------------------------------------------------------------


def test_what_ends_the_judge_or_a_server_does_so_for_one_notebook(monkeypatch):
    asked = []

    def judged(_judge, paths, *_):
        asked.append(len(paths))
        until = paths.index("ends a server") + 1 if "ends a server" in paths else len(paths)
        if "ends the judge" in paths[:until]:
            raise DtlabError("signal SIGSEGV\nat some place")
        return [notebook.NotebookReport(path).to_dict() for path in paths[:until]]

    monkeypatch.setattr(notebook, "in_own_process", judged)
    reports = grade_notebooks(["a", "ends a server", "b", "ends the judge", "c"], sandbox="none")
    assert [each.path for each in reports] == ["a", "ends a server", "b", "ends the judge", "c"]
    assert [each.error for each in reports if each.error] == [
        "ends the judge: it ended the process that graded it (signal SIGSEGV)"]
    assert asked == [5, 3, 1, 1, 1]


def test_one_bad_notebook_does_not_stop_the_others(tmp_path, welcome, monkeypatch):
    monkeypatch.chdir(tmp_path)  # short paths leave the table its width
    (tmp_path / "ada.ipynb").write_text(json.dumps(welcome))
    (tmp_path / "bob.ipynb").write_text("{")
    marked(welcome, "hello-ranks")["source"] = "def hello(comm): return 0"
    (tmp_path / "cyd.ipynb").write_text(json.dumps(welcome))
    found = find_each(sorted(Path().glob("*.ipynb")), tmp_path)
    reports = [*grade_hand_ins(found, None, None, "none").values()]
    assert [report.points for report in reports] == [8, 0, 4]
    assert [bool(report.error) for report in reports] == [False, True, False]
    rows = list(csv.DictReader(io.StringIO(to_csv(reports))))
    assert [row["points"] for row in rows] == ["8", "", "4"]
    assert [row["hello-ranks"] for row in rows] == ["4", "", "0"]
    assert "not a notebook" in rows[1]["error"]
    table = class_table([report for report in reports if not report.error])
    assert "hello-ranks 0/4" in table
    assert "ada.ipynb" in table
    reports[0].path = "hand-ins/" * 20 + "ada.ipynb"  # takes no width from what else is said
    assert "hello-ranks 0/4" in class_table([reports[0], reports[2]])
