"""The README and its kin promise nothing that is not there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtlab.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("paper", ["README.md", "CONTRIBUTING.md"])
def test_every_link_leads_somewhere_and_every_make_target_that_is_named_exists(paper: str) -> None:
    text = (ROOT / paper).read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    missing = [link for link in links if not (ROOT / link).exists()]
    assert missing == []
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", text, flags=re.M))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert named
    assert named <= targets


def test_every_command_that_is_named_exists() -> None:
    named = set(re.findall(r"`dtlab ([a-z]+)", README))
    assert named
    assert named <= COMMANDS.keys()


def test_the_code_runs_as_it_stands() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    shown = code + "\nassert dtlab.run(add_up, ranks=4, echo=False).values == [6.0] * 4\n"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_course_map_says_ready_of_the_chapters_that_exist_and_of_no_other() -> None:
    rows = re.findall(r"^\| ([0-9–]+b?) \| (.*) \| (.*) \|$", README, flags=re.M)
    ready = {number for number, _, state in rows if state.startswith("ready")}
    there = {path.name.partition("_")[0] for path in ROOT.glob("notebooks/*.ipynb")}
    assert ready == there
    for number, title, state in rows:
        linked = re.findall(r"\((notebooks/[^)]+)\)", title)
        assert len(linked) == (1 if state.startswith("ready") else 0), number


def test_it_fits_on_one_screen() -> None:
    assert len(README.splitlines()) <= 71
