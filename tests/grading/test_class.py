"""A class: who handed in what, results that stay, and files that want to stop the grading."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import zipfile
from datetime import datetime
from pathlib import Path

import pytest

from dtlab import ConfigError
from dtlab.grading import class_grading, class_report
from dtlab.grading.class_grading import grade_class
from dtlab.grading.class_report import rows_of, write_results
from dtlab.grading.notebook import grade_notebook
from dtlab.grading.similarity import alike
from dtlab.grading.submissions import find_hand_ins, learner_of

ROOT = Path(__file__).resolve().parents[2]
WELCOME = ROOT / "solutions" / "00_welcome.ipynb"
SEED = 5


def marked(notebook: dict, grade_id: str) -> dict:
    return next(cell for cell in notebook["cells"]
                if cell["metadata"].get("nbgrader", {}).get("grade_id") == grade_id)


def hand_in(path: Path, hello: str = "", when: str = "") -> None:
    """Write the solution of chapter 00, with another answer to its first exercise."""
    notebook = json.loads(WELCOME.read_text())
    if hello:
        marked(notebook, "hello-ranks")["source"] = hello
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook))
    if when:
        at = datetime.fromisoformat(when).timestamp()
        os.utime(path, (at, at))


# ---- finding hand-ins ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "learner"), [
    ("ada/05.ipynb", "ada"),
    ("ada/week1/deep/05.ipynb", "ada"),
    ("ada_05_all_reduce.ipynb", "ada"),
    ("ada lovelace 05_all_reduce.ipynb", "ada lovelace"),
    ("ada.zip", "ada"),
    ("Ada Lovelace_4711_assignsubmission_file_/05.ipynb", "Ada Lovelace"),
    ("lovelaceada_LATE_123_4567_05_all_reduce.ipynb", "lovelaceada"),
])
def test_the_learner_is_read_off_the_path(name, learner):
    assert learner_of(Path(name)).name == learner


def test_two_spellings_of_a_letter_are_one_learner():
    composed, decomposed = "Zoé_05_all_reduce.ipynb", "Zoe\u0301_06_wires.ipynb"
    assert learner_of(Path(composed)) == learner_of(Path(decomposed))
    assert learner_of(Path("Zoe\u0301/a.ipynb")) == learner_of(Path("Zoé/b.ipynb"))


def write_zip(path: Path, *names: str, text: str = "") -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, name in enumerate(names):
            member = zipfile.ZipInfo(name, (2026 - number % 20, 11, 28, 0, 0, 0))
            archive.writestr(member, text or WELCOME.read_text(), zipfile.ZIP_DEFLATED)


def test_learners_of_one_name_are_told_apart_and_whoever_handed_in_something_has_a_row(tmp_path):
    folder = tmp_path / "class"
    for name in ("Jo Li_101_assignsubmission_file", "Jo Li_202_assignsubmission_file", "a\nb",
                 "a b", "eve_00_welcome.v2.ipynb", "eve_05b_fewer_rounds (1).ipynb", "flo.IPYNB",
                 os.fsdecode(b"caf\xe9")):
        hand_in(folder / name if "." in name else folder / name / "x.ipynb")
    for name in ("gus/report.pdf", "gus/notes.txt", "Jo Li_101_assignsubmission_file/plot.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("…")
    (folder / "hal" / ".ipynb_checkpoints").mkdir(parents=True)
    (folder / "hal" / ".DS_Store").touch()
    (folder / "ida").symlink_to(tmp_path)
    found = find_hand_ins(folder, tmp_path / "unpacked")
    assert sorted(each.learner for each in found) == [
        "Jo Li (101)", "Jo Li (202)", "a b (1)", "a b (2)", "caf?", "eve", "eve", "flo", "gus",
        "hal", "ida"]
    assert {each.learner: each.problem for each in found if each.problem} == {
        "gus": "its name ends neither in .ipynb nor in .zip", "hal": "this folder is empty",
        "ida": "it is a link; hand in the folder itself"}


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    hand_in(tmp_path / "class" / "ada" / "x.ipynb")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read all
    (found,) = find_hand_ins(tmp_path / "class", tmp_path / "unpacked")
    assert found.problem == "you may not read it"


def test_a_zip_is_bounded_in_all_and_its_later_copy_counts(tmp_path):
    folder, out = tmp_path / "class", tmp_path / "unpacked"
    folder.mkdir()
    write_zip(folder / "ada.zip", "new.ipynb", "old/new.ipynb")
    write_zip(folder / "bob.ZIP", *(f"{n}.ipynb" for n in range(101)))
    write_zip(folder / "dan.zip", *(f"node_modules/{n}.js" for n in range(1100)), "x.ipynb")
    found = {each.name: each for each in find_hand_ins(folder, out)}
    assert found["ada.zip/new.ipynb"].saved > found["ada.zip/old/new.ipynb"].saved
    assert "101 notebooks" in found["bob.ZIP"].problem
    assert found["dan.zip/x.ipynb"].problem == ""


def test_what_a_mac_or_an_editor_keeps_beside_a_notebook_is_no_hand_in(tmp_path):
    kept = ("._a.ipynb", "__MACOSX\\._a.ipynb", "x/.ipynb_checkpoints/a.ipynb",
            ".virtual_documents/a.ipynb")
    (tmp_path / "class").mkdir()
    write_zip(tmp_path / "class" / "ada.zip", "work\\a.ipynb", *kept)
    for name in ("a.ipynb", kept[0], *kept[2:]):
        file = tmp_path / "class" / "bob" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    found = find_hand_ins(tmp_path / "class", tmp_path / "unpacked")
    assert [each.name for each in found] == ["ada.zip/work\\a.ipynb", "bob/a.ipynb"]


def test_a_zip_that_would_fill_the_disk_is_one_note_and_leaves_no_file(tmp_path):
    folder, out = tmp_path / "class", tmp_path / "unpacked"
    folder.mkdir()
    with zipfile.ZipFile(folder / "ada.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for n in range(50):  # a gigabyte in all
            archive.writestr(f"{n}.ipynb", bytes(20_000_000))
    write_zip(folder / "bob.zip", *(f"{n}.ipynb" for n in range(200)), text="{}")
    found = {each.name: each.problem for each in find_hand_ins(folder, out)}
    assert list(found) == ["ada.zip", "bob.zip"]
    assert all("it may have 100, of 100,000,000" in problem for problem in found.values())
    assert not out.exists()


def test_nothing_that_a_learner_writes_ends_the_grading_of_the_others(tmp_path):
    folder, out = tmp_path / "class", tmp_path / "out"
    hand_in(folder / "ada" / "x.ipynb", "def hello(comm):\n    raise ValueError(chr(0xd800))")
    hand_in(folder / os.fsdecode(b"caf\xe9") / "x.ipynb")
    hand_in(folder / "eve" / "x.ipynb", "def hello(comm): return [" + "1," * 1_000_000 + "]")
    hand_in(folder / "fay" / "x.ipynb",
            "class NotYourOwn(Exception): pass\ndef hello(comm): raise NotYourOwn()")
    results = grade_class(folder, out, seed=SEED, sandbox="none")
    write_results(results, out, SEED)
    assert [row.points for row in rows_of(results)] == [4, 8, 4, 4]


def test_links_pipes_and_bad_zips_are_named_and_nothing_leaves_its_place(tmp_path):
    folder = tmp_path / "class"
    (folder / "gus").mkdir(parents=True)
    os.mkfifo(folder / "gus" / "pipe.ipynb")
    os.symlink("/dev/zero", folder / "gus" / "zero.ipynb")
    (folder / "ida.zip").write_bytes(b"no zip")
    with zipfile.ZipFile(folder / "hal.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(WELCOME, "../../../outside.ipynb")
        archive.writestr("__MACOSX/x.ipynb", "{}")
        archive.writestr("bomb.ipynb", b"\0" * 50_000_000)
    found = {each.name: each for each in find_hand_ins(folder, tmp_path / "unpacked")}
    assert "link" in found["gus/zero.ipynb"].problem
    assert "no ordinary file" in found["gus/pipe.ipynb"].problem
    assert "no zip" in found["ida.zip"].problem
    assert "more than" in found["hal.zip/bomb.ipynb"].problem
    good = found["hal.zip/../../../outside.ipynb"]
    assert (good.learner, good.problem) == ("hal", "")
    assert good.file.parent == tmp_path / "unpacked"
    assert len(found) == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["class", "unpacked"]


# ---- a class -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """(the class's folder, the results' folder, what grading gave)."""
    folder, out = tmp_path_factory.mktemp("class"), tmp_path_factory.mktemp("results")
    leaks = ("def hello(comm):\n    print('secret', comm.rank)\n"
             "    raise ValueError('\\x1b[31m<script>')")
    hand_in(folder / "ada" / "00_welcome.ipynb", "def hello(comm): return 0", "2026-11-01")
    hand_in(folder / "ada" / "00_again.ipynb", "", "2026-11-03")
    hand_in(folder / "=eve" / "x.ipynb", leaks, "2026-11-01")
    (folder / "fred").mkdir()
    (folder / "fred" / "x.ipynb").write_text('{"cells": [null, {"cell_type": "code", "metadata": '
                                             '{"nbgrader": {"grade_id": ["a"]}, "tags": 3}, '
                                             '"source": null}]}')
    results = grade_class(folder, out, jobs=2, seed=SEED, sandbox="none",
                          deadline=datetime(2026, 11, 2))
    write_results(results, out, SEED)
    return folder, out, results


def test_every_hand_in_is_a_row_and_the_later_one_counts(graded):
    rows = {row.learner: row for row in rows_of(graded[2])}
    assert list(rows) == ["=eve", "ada", "fred"]
    assert (rows["ada"].points, rows["ada"].max_points) == (8, 8)
    assert rows["ada"].notes == ["ada/00_again.ipynb: late",
                                 "ada/00_welcome.ipynb: a later hand-in counts"]
    assert (rows["=eve"].points, rows["=eve"].max_points) == (4, 8)
    assert "no exercise of this course" in rows["fred"].notes[0]


def test_the_table_of_the_class_opens_in_a_spreadsheet_without_formulas(graded):
    rows = list(csv.DictReader(io.StringIO((graded[1] / "class.csv").read_text("utf-8-sig"))))
    assert [row["learner"] for row in rows] == ["'=eve", "ada", "fred"]
    assert [row["hello-ranks"] for row in rows] == ["0", "4", ""]


def test_pages_escape_what_learners_wrote(graded):
    page = next((graded[1] / "learners").glob("*eve.html")).read_text()
    assert "<script>" not in page
    assert "\x1b" not in page
    assert "ValueError" in page
    told = json.loads(next((graded[1] / "learners").glob("*eve.json")).read_text())
    assert told["score"] == 4
    assert sum(test["score"] for test in told["tests"]) == 4
    assert sum(test["max_score"] for test in told["tests"]) == 8
    assert "\x1b" not in json.dumps(told)
    assert re.search(r"their checks ran for \d+ s", (graded[1] / "index.html").read_text())


def test_what_nobody_has_written_is_no_mistake_and_a_broken_file_is_explained(graded):
    folder, _, results = graded
    rows = rows_of(results)
    assert [(row.learner, row.page) for row in rows] == [
        ("=eve", "001__eve"), ("ada", "002_ada"), ("fred", "003_fred")]
    assert rows[2].notes[0].startswith("fred/x.ipynb: ")
    assert str(folder) not in rows[2].notes[0]
    stub = json.loads((ROOT / "exercises" / WELCOME.name).read_text())
    untouched = marked(stub, "hello-ranks")["source"]
    report = grade_notebook(stub_with(graded[1], untouched), sandbox="none")
    alone = class_report.LearnerRow("bo", "1", [class_grading.Graded(results[0].hand_in, report)])
    assert report.exercises[0].points == 0
    assert class_report._written([alone]) == [report.exercises[1]]


def stub_with(folder: Path, hello) -> Path:
    """The solution, but for one answer that is as it was handed out."""
    hand_in(folder / "bo.ipynb", hello)
    return folder / "bo.ipynb"


def test_what_is_graded_is_not_graded_again(graded, monkeypatch):
    folder, out, before = graded
    monkeypatch.setattr(class_grading, "grade_notebooks", None)
    again = grade_class(folder, out, seed=SEED, sandbox="none")
    assert [each.report.points for each in again] == [each.report.points for each in before]
    with pytest.raises(TypeError):  # another seed: all anew
        grade_class(folder, out, seed=SEED + 1, sandbox="none")


def test_results_do_not_go_where_submissions_are(graded):
    with pytest.raises(ConfigError, match="write results elsewhere"):
        grade_class(graded[0], graded[0] / "results", sandbox="none")


def test_a_class_is_not_graded_on_the_inputs_that_learners_see(graded):
    with pytest.raises(ConfigError, match="no hidden inputs"):
        grade_class(graded[0], graded[1], sandbox="none", course=ROOT / "exercises")


def test_an_empty_folder_is_explained(tmp_path):
    with pytest.raises(ConfigError, match="no notebook and no zip"):
        grade_class(tmp_path, tmp_path.parent / "out", sandbox="none")


def test_half_a_result_is_never_kept(tmp_path, monkeypatch):
    folder, out = tmp_path / "class", tmp_path / "out"
    hand_in(folder / "ada" / "x.ipynb")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(class_grading, "grade_notebooks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grade_class(folder, out, sandbox="none")
    assert list((out / "graded").iterdir()) == []
    shutil.rmtree(out)


def test_a_page_of_an_earlier_run_does_not_stay(tmp_path):
    write_results([], tmp_path, SEED, ["Cyd", "ada"])
    (tmp_path / "learners" / "mine.txt").write_text("a note of the teacher's")
    write_results([], tmp_path, SEED, ["Cyd", "ada", "Bo"])
    assert sorted(path.name for path in (tmp_path / "learners").iterdir()) == [
        "001_ada.html", "001_ada.json", "002_Bo.html", "002_Bo.json", "003_Cyd.html",
        "003_Cyd.json", "mine.txt"]


# ---- similar answers -----------------------------------------------------------------------------


def test_a_copy_with_other_comments_is_similar_and_another_idea_is_not():
    source = "def f(comm, x):\n" + "".join(f"    y{i} = x[{i}] + comm.rank\n" for i in range(12))
    copied = "# mine\n" + source.replace(" + ", "+").replace("y3", "mine")
    other = "def f(comm, x):\n" + "".join(f"    x.add_(comm.size).mul_({i})\n" for i in range(12))
    answers = {"ada": {"e": source}, "bo": {"e": copied}, "cyd": {"e": other}, "dan": {"e": "x ="}}
    (found,) = alike(answers)
    assert (found.exercise, found.learners) == ("e", "ada, bo")
    assert 0.9 < found.share < 1
    equal = {name: {"e": "# none\n" + source} for name in ("eve", "fred", "gus")}
    assert [(each.learners, each.share == 1) for each in alike(answers | equal)] == [
        ("ada, eve, fred, gus", True), ("ada, eve, fred, gus, bo", False)]


# ---- what platforms and programs write -----------------------------------------------------------


def test_a_zip_without_dates_counts_canvas_says_who_is_late_and_absentees_have_a_row(tmp_path):
    folder, out = tmp_path / "class", tmp_path / "out"
    folder.mkdir()
    member = zipfile.ZipInfo("00_welcome.ipynb")
    member.date_time = (1980, 0, 0, 0, 0, 0)
    with zipfile.ZipFile(folder / "ada.zip", "w") as archive:
        archive.writestr(member, WELCOME.read_text())
    late = "lovelaceada_LATE_123_4567_00_welcome.ipynb"
    (folder / late).write_text(WELCOME.read_text())
    (folder / "\uff1dcmd\nx_00_welcome.ipynb").write_text(WELCOME.read_text())
    graded = grade_class(folder, out, sandbox="none", seed=SEED)
    write_results(graded, out, SEED, ["ada", "Zoé"])
    rows = {row.learner: row for row in rows_of(graded, ["ada", "Zoé"])}
    assert rows["ada"].max_points == 8
    assert rows["lovelaceada"].notes == [f"{late}: late"]
    assert rows["Zoé"].notes == ["nothing was handed in"]
    page = out / "learners" / f"{rows['Zoé'].page}.html"
    assert "Nothing was handed in." in page.read_text("utf-8")
    assert "0 of 0" not in page.read_text("utf-8")
    table = (out / "class.csv").read_text("utf-8-sig")
    assert len(table.splitlines()) == 5
    assert "\n'\uff1dcmd x," in table
