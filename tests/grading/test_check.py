"""`check`: its arguments, its display, its exercises."""

from __future__ import annotations

import json
import linecache
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import dtlab
from dtlab import ConfigError, check
from dtlab.collectives.all_reduce_topology import hierarchical
from dtlab.grading import catalogue
from dtlab.grading.learner_check import names_missing_in_class

ROOT = Path(__file__).resolve().parents[2]


def hello(comm):
    return comm.rank, comm.size, (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size


def test_an_unknown_exercise_lists_the_known_ones():
    with pytest.raises(ConfigError) as error:
        check("ring", hello)
    for known in catalogue():
        assert known in str(error.value)


@pytest.mark.parametrize("wrong", [None, 3, "hello", (0, 4, 3, 1)])
def test_the_result_instead_of_the_function_is_explained(wrong):
    with pytest.raises(ConfigError, match="without calling it"):
        check("hello-ranks", wrong)


@pytest.mark.parametrize("seed", ["4", 1.5, -1, None])
def test_a_seed_that_is_no_whole_number_is_explained_in_one_sentence(seed):
    with pytest.raises(ConfigError, match=r"^seed is a whole number, 0 or more, not .*$"):
        check("hello-ranks", hello, show=False, seed=seed)


def test_importing_and_the_communicator_are_free_to_use():
    def busy(comm):
        from dtlab import Recv, Send

        print(comm, Send(1, 0), Recv([], 0))
        comm.accumulate_(torch.zeros(2), torch.ones(2))
        return hello(comm)

    assert check("hello-ranks", busy, show=False).points == 4


def test_what_cannot_be_pickled_is_explained():
    import threading

    lock = threading.Lock()
    with pytest.raises(ConfigError, match="create what it needs inside"):
        check("hello-ranks", lambda comm: (lock, hello(comm))[1])


def test_the_table_is_printed_once_and_the_report_returned(capsys):
    report = check("hello-ranks", hello)
    out = capsys.readouterr()
    assert out.out.count("hello-ranks: 4 of 4 points") == 1
    assert out.err == ""
    assert report.points == 4
    check("hello-ranks", hello, show=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("answer", [
    lambda comm: hello(comm),
    partial(lambda extra, comm: hello(comm), None),
    type("Callable", (), {"__call__": lambda self, comm: hello(comm)})(),
], ids=["lambda", "partial", "object"])
def test_any_callable_can_be_checked(answer):
    assert check("hello-ranks", answer, show=False).points == 4


def test_it_works_from_a_script_without_a_main_guard(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import dtlab\n"
        "print('once')\n"
        "def hello(comm):\n"
        "    n = comm.size\n"
        "    return comm.rank, n, (comm.rank - 1) % n, (comm.rank + 1) % n\n"
        "dtlab.check('hello-ranks', hello)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True,
                          timeout=100, cwd=tmp_path, env=None)
    assert done.stderr == ""
    assert done.stdout.count("once") == 1
    assert "4 of 4 points" in done.stdout


def test_a_helper_module_beside_the_notebook_can_be_imported(tmp_path, monkeypatch):
    (tmp_path / "helper_of_mine.py").write_text("def mod(a, b):\n    return a % b\n")
    monkeypatch.syspath_prepend(tmp_path)

    def with_helper(comm):
        import helper_of_mine

        mod = helper_of_mine.mod
        return comm.rank, comm.size, mod(comm.rank - 1, comm.size), mod(comm.rank + 1, comm.size)

    assert check("hello-ranks", with_helper, show=False).points == 4


def test_other_sizes_are_tried_with_another_seed():
    def tried(seed):
        return [[case.tried for case in each.cases]
                for each in catalogue()["ring-all-reduce"].build(seed)]

    assert tried(0) == tried(0)
    assert tried(0) != tried(2)


def test_a_notebook_shows_the_table_once_as_html_and_nothing_goes_to_stderr():
    import nbformat
    from nbclient import NotebookClient

    hello = "def hello(comm):\n    print('seen by nobody')\n    return comm.rank / 0\n"
    last = "from dtlab import check\n" + hello + "check('hello-ranks', hello)"
    kept = "report = check('hello-ranks', hello)"
    cells = [nbformat.v4.new_code_cell(source) for source in (last, kept, "report", "1 + 1")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    whom_it_trusts = cells[0]["outputs"].pop()  # once in a kernel
    assert whom_it_trusts["name"] == "stdout"
    assert "check only code that you trust" in whom_it_trusts["text"]
    for cell in cells[:3]:
        (output,) = cell["outputs"]
        assert output["output_type"] == "display_data"
        assert "0 of 4 points" in output["data"]["text/html"]
        assert "return comm.rank / 0" in output["data"]["text/html"]  # the learner's own line
        assert "your cell" in output["data"]["text/html"]
        assert "hello-ranks: 0 of 4 points" in output["data"]["text/plain"]


# ---- the exercises, their notebooks and their points agree --------------------------------------


def cells():
    for path in sorted((ROOT / "solutions").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            yield path, cell, "".join(cell["source"])


def test_every_exercise_has_its_cells_and_every_cell_its_points():
    answers, graded = {}, {}
    for path, cell, source in cells():
        mark = cell["metadata"].get("nbgrader", {})
        if mark.get("solution"):
            answers[mark["grade_id"]] = (path.name, source)
        if mark.get("grade"):
            graded[mark["grade_id"].removesuffix("-points")] = (path.name, source, mark["points"])
    assert set(answers) == set(graded) == set(catalogue())
    for each in catalogue().values():
        name, source = answers[each.id]
        assert name.startswith(each.chapter)
        assert f"def {each.function}(" in source
        name, source, points = graded[each.id]
        assert points == each.points
        assert f'check("{each.id}", {each.function}' in source
        assert "### BEGIN HIDDEN TESTS" in source
        assert source.rstrip().endswith(".points")


def test_the_task_texts_name_the_points_that_the_checks_give():
    text = "".join(source for _, cell, source in cells() if cell["cell_type"] == "markdown")
    for each in catalogue().values():
        heading = f"({each.points:g} points)"
        assert heading in text, f"{each.id}: {heading}"


def test_seeds_change_no_points():
    for each in catalogue().values():
        shape = [(c.name, c.points) for c in each.build(0)]
        assert shape == [(c.name, c.points) for c in each.build(2)]
        assert len({name for name, _ in shape}) == len(shape)


def test_check_is_at_the_front_door():
    assert dtlab.check is check


def test_what_a_class_does_not_have_is_named_at_once(capsys, tmp_path, monkeypatch):
    """Of other cells only functions, classes and imports count; modules beside the notebook don't.
    """
    (tmp_path / "beside.py").write_text("def three(): return 3")
    monkeypatch.syspath_prepend(tmp_path)
    cells = {"<cell 1>": "from math import *\nONE, four, five, ZERO = 1, lambda: int(pi), 5, 0\n"
                         "third = lambda: five\n\n\n"
                         "def of(comm, n, zero=ZERO):\n"
                         "    return (comm.rank + n * ONE + four() - third() + int(e)) % comm.size",
             "<cell 2>": "from beside import three\nTWO = 2\n\n\ndef half(n): return n // TWO\n\n\n"
                         "def hello(comm):\n    size = half(TWO * comm.size) + three() - 3\n"
                         "    return comm.rank, size, of(comm, -1), of(comm, 1)"}
    notebook: dict = {}
    for name, source in cells.items():
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), notebook)
    assert check("hello-ranks", notebook["hello"]).points == 4
    assert ("In a class there is no ONE and no ZERO and no five and no four and no three: of "
            "other cells only" in capsys.readouterr().out)
    assert names_missing_in_class(lambda: ONE) == []  # noqa: F821  a file's, not a notebook's
    exec(compile("SIX = 6\ndef six(): return SIX", "<timed exec>", "exec"), notebook)  # %%time
    assert names_missing_in_class(notebook["six"]) == []


def test_what_an_exercise_asks_for_is_not_in_the_library_at_home_either():
    def bare(comm, x, group):
        return hierarchical(comm, x, "sum", group)

    report = check("hierarchical", bare, show=False)
    assert report.points == 0
    assert "the answer calls dtlab.collectives.all_reduce_topology.hierarchical" in str(report)
