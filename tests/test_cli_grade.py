"""`dtlab grade`: what it prints and how it ends. What earns points is tested in tests/grading."""

from __future__ import annotations

import csv
import errno
import io
import json
import shutil
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from dtlab.cli.grade import last_moment
from dtlab.errors import ConfigError
from dtlab.grading import class_grading
from tests.commands import assert_bad_input, call

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "exercises" / "00_welcome.ipynb"
SOLUTION = ROOT / "solutions" / "00_welcome.ipynb"


def grade(*words: Any) -> Any:
    return call("grade", "--sandbox", "none", *words)


def test_an_untouched_exercise_gets_nothing_and_exit_code_1() -> None:
    result = grade(STUB, "--json")
    assert result.exit_code == 1
    reports = json.loads(result.stdout)
    assert reports
    assert all(report["points"] == 0 < report["max_points"] for report in reports)


def test_a_solution_gets_all_and_exit_code_0() -> None:
    result = grade(SOLUTION)
    assert result.exit_code == 0, result.output
    assert "8 of 8 points" in result.output


def test_a_class_becomes_a_table_or_a_csv_file(tmp_path: Path) -> None:
    shutil.copy(STUB, tmp_path / "ada.ipynb")
    shutil.copy(ROOT / "exercises" / "03_messages.ipynb", tmp_path / "bob.ipynb")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    shutil.copy(STUB, tmp_path / ".ipynb_checkpoints" / "ada-checkpoint.ipynb")
    table = grade(tmp_path)
    assert table.exit_code == 1
    assert "ada.ipynb" in table.output
    assert "bob.ipynb" in table.output
    rows = list(csv.DictReader(io.StringIO(grade(tmp_path, "--csv").stdout)))
    assert [Path(row["notebook"]).name for row in rows] == ["ada.ipynb", "bob.ipynb"]
    assert rows[0]["hello-ranks"] == rows[1]["shift"] == "0"


BAD_FILES = {
    "empty.ipynb": b"",
    "corrupt.ipynb": b'{"cells": [',
    "other.json": b'{"a": 1}',
    "foreign.ipynb": b'{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}',
    "old.ipynb": b'{"worksheets": [], "metadata": {}, "nbformat": 3}',
    "binary.ipynb": b"\x89PNG\x00\x01",
    "latin.ipynb": b"\xff\xfe\x00{",
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_what_is_no_notebook_of_the_course_is_told_in_one_sentence(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(BAD_FILES[name])
    result = grade(path)
    assert_bad_input(result, str(path))
    assert result.stderr.count(str(path)) == 1


def test_a_file_that_is_not_there_does_not_keep_others_from_their_grade(tmp_path: Path) -> None:
    result = grade(tmp_path / "none.ipynb", STUB)
    assert result.exit_code == 2
    assert "none.ipynb" in result.stderr
    assert "of 8 points" in result.stdout


def test_a_deadline_is_of_this_machine_or_says_its_time_zone(monkeypatch, capsys):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert last_moment("2026-12-01 23:59") == datetime(2026, 12, 1, 23, 59)
        assert "2026-12-01 23:59 CET (UTC+0100), this machine's" in capsys.readouterr().err
        assert last_moment("2026-12-01 23:59 America/New_York") == datetime(2026, 12, 2, 5, 59)
        assert last_moment("2026-12-01 12:00 +05:30") == datetime(2026, 12, 1, 7, 30)
        assert last_moment("2026-12-01 +00:00") == datetime(2026, 12, 2, 0, 59, 59)
        assert last_moment("2026-12-01") == datetime(2026, 12, 1, 23, 59, 59)
        assert last_moment(None) is None
        with pytest.raises(ConfigError, match="a time zone may follow"):
            last_moment("2026-12-01 12:00 Mars/Olympus")
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(("words", "sentence"), [
    (["no_such_folder", "--out", "results"], "no_such_folder does not exist"),
    ([".", "--out", __file__], "is a file: name a folder for results"),
    ([".", "--jobs", "2"], "--jobs, --deadline and --names are for a class"),
    ([".", "--out", "results", "--deadline", "1.12.2026"], "--deadline is written 2026-12-01"),
    ([".", "--only", "fork"], "--only chooses among attacks: add --attack"),
    (["--attack", "--only", "no_such_attack"], "no attack has 'no_such_attack' in its name"),
    (["."], "there is no notebook and no zip in this folder"),
    ([STUB, "--json", "--csv"], "--json and --csv are two forms of the same: choose one"),
])
def test_what_makes_no_sense_gets_one_sentence(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call("grade", *words)
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("error", "code"), [
    (KeyboardInterrupt(), 130), (OSError(errno.ENOSPC, "No space left on device"), 2)])
@pytest.mark.parametrize("step", ["class_grading.grade_class", "class_report.write_results"])
def test_a_class_that_is_interrupted_says_how_to_go_on(step, error, code, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise error

    monkeypatch.setattr(class_grading, "grade_class", lambda *_, **__: [])
    monkeypatch.setattr(f"dtlab.grading.{step}", interrupted)
    result = grade(tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == code
    assert "the same command goes on from there" in result.stderr


def test_hand_ins_of_names_that_are_not_in_the_list_are_told(tmp_path: Path) -> None:
    (tmp_path / "class" / "adda").mkdir(parents=True)
    (tmp_path / "class" / "adda" / "x.ipynb").touch()
    (tmp_path / "class" / "bob.ipynb").touch()
    (tmp_path / "names.txt").write_text("ada\nbob\n")
    result = grade(tmp_path / "class", "--out", tmp_path / "out",
                   "--names", tmp_path / "names.txt", "--seed", 1)
    assert "as they are spelled here: adda\n" in result.stderr
    page = (tmp_path / "out" / "learners" / "002_adda.html").read_text("utf-8")
    when = datetime.fromtimestamp((tmp_path / "class" / "adda" / "x.ipynb").stat().st_mtime)
    assert f"Handed in {when.astimezone():%Y-%m-%d %H:%M %Z}" in page
