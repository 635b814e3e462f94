"""What the guides say is what the course does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dtlab import check, run
from dtlab.cli import app
from dtlab.grading import catalogue
from dtlab.grading.judge import grade_answer, prepare_to_fork
from dtlab.grading.learner_check import make_submission
from dtlab.grading.rank_server import RankServer

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "teaching.md").read_text()


def test_the_table_of_exercises_is_the_catalogue():
    rows = re.findall(r"^\| (\d\d) \| ([\w-]+) \| (\d+) \| (.*) \|$", GUIDE, re.M)
    assert rows == [(each.chapter, each.id, f"{each.points:g}",
                     ", ".join(f"{c.name} {c.points:g}" for c in each.build(0)))
                    for each in catalogue().values()]


def test_the_table_of_the_learners_guide_is_what_check_prints():
    guide = (ROOT / "docs" / "reading_a_grade.md").read_text()
    code, printed = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", guide, re.S).groups()
    space = {}
    exec(code, space)
    assert check("hello-ranks", space["hello"], show=False).to_text(100) == printed.rstrip()


def swap(comm, x):
    partner = comm.rank ^ 1
    inbox = x.clone()
    if partner < comm.size:
        comm.sendrecv(x, partner, inbox, partner)
    return inbox


def one_after_the_other(comm, x):
    partner, inbox = comm.rank ^ 1, x.clone()
    if partner < comm.size:
        for sender in sorted((comm.rank, partner)):
            if sender == comm.rank:
                comm.send(x, partner)
            else:
                comm.recv(inbox, partner)
    return inbox


def forgets_the_last(comm, x):
    inbox = x.clone()
    comm.sendrecv(x, comm.rank ^ 1, inbox, comm.rank ^ 1)
    return inbox


@pytest.mark.parametrize(("answer", "points"), [
    (swap, 4), (one_after_the_other, 3), (forgets_the_last, 3)])
def test_the_example_of_an_exercise_is_complete(answer, points):
    example = re.search(r"```python\n(\"\"\"Chapter 03: swap.*?)```", GUIDE, re.S)[1]
    assert len([line for line in example.splitlines() if line.strip()]) < 35

    def judge(comm, submission):
        prepare_to_fork()
        with RankServer("none", ("collectives", "cost")) as server:
            space = {}
            exec(example, space)
            return grade_answer(server, submission, space["EXERCISE"], 2).points

    assert run(judge, make_submission(answer, "swap"), ranks=1, echo=False).values == [points]


def test_the_commands_of_the_guide_exist():
    for command in set(re.findall(r"dtlab (\w+)", GUIDE)) - {"release", "grading"}:
        if command in ("demo", "simulate", "train", "show", "bench", "grade"):
            assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
    assert CliRunner().invoke(app, ["release", "--help"]).exit_code == 0


def test_the_line_of_the_workflow_runs(tmp_path, monkeypatch):
    steps = yaml.safe_load((ROOT / "docs" / "self_check.yml").read_text())["jobs"]["check"]["steps"]
    words = steps[-1]["run"].split(" | ")[0].split()
    assert words[0] == "dtlab"
    (tmp_path / "exercises").mkdir()
    stub = "00_welcome.ipynb"
    (tmp_path / "exercises" / stub).write_text((ROOT / "exercises" / stub).read_text())
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 1
    assert "0 of 8 points" in result.output
