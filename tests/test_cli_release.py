"""`dtlab release`: whole, and without what learners must not see."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dtlab.cli.release import chapters_in
from tests.commands import assert_bad_input, call

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chapters 03 to 05."""
    out = tmp_path_factory.mktemp("release") / "course"
    result = call("release", out, "--chapters", "03-05")
    assert result.exit_code == 0, result.output
    return out


def secrets() -> set[str]:
    """The lines of the solutions and hidden tests that no exercise shows, if they are long."""
    found: set[str] = set()
    for path in (ROOT / "solutions").glob("*.ipynb"):
        shown = (ROOT / "exercises" / path.name).read_text()
        for cell in json.loads(path.read_text())["cells"]:
            text = "".join(cell["source"])
            for part in re.findall(r"### BEGIN (?:SOLUTION|HIDDEN TESTS)(.*?)### END", text, re.S):
                found |= {line.strip() for line in part.splitlines()
                          if len(line.strip()) > 45 and json.dumps(line.strip())[1:-1] not in shown}
    return found


def test_the_chosen_chapters_are_there_and_no_others(bundle: Path) -> None:
    exercises = sorted(path.name for path in (bundle / "exercises").glob("*.ipynb"))
    assert exercises == ["03_messages.ipynb", "04_collectives.ipynb", "05_all_reduce.ipynb"]
    notebooks = {path.name[:3] for path in (bundle / "notebooks").glob("*.ipynb")}
    assert notebooks == {"03_", "04_", "04b", "05_", "05b"}
    for name in ("solutions", "tests", ".git"):
        assert not (bundle / name).exists()


def test_nothing_leaks(bundle: Path) -> None:
    wanted = secrets()
    assert len(wanted) > 100
    for path in (bundle / "exercises").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
        assert "HIDDEN" not in text
        assert "SOLUTION" not in text
        assert "seed=" not in text
        assert not [line for line in wanted if line in text]


def test_the_manifest_names_every_file(bundle: Path) -> None:
    subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=bundle, check=True)
    listed = {line.split("  ", 1)[1] for line in (bundle / "SHA256SUMS").read_text().splitlines()}
    files = {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()}
    assert files == listed | {"SHA256SUMS"}


def test_learners_grade_their_own_notebook_in_it(bundle: Path) -> None:
    for name in ("teaching.md", "README.md"):
        assert (bundle / "docs" / name).exists() is False
    assert "make lab" in (bundle / "README.md").read_text()
    lines = subprocess.run(["make", "-n", "lab"], cwd=bundle, capture_output=True, text=True,
                           check=True).stdout.splitlines()
    assert lines == ["sh scripts/setup.sh", ".venv/bin/dtlab lab "]
    asked = ["-m", "dtlab", "grade", "exercises/03_messages.ipynb", "--sandbox", "none"]
    env = {**os.environ, "PYTHONPATH": str(bundle)}
    done = subprocess.run([sys.executable, *asked], cwd=bundle, env=env, capture_output=True,
                          text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stderr
    assert "0 of 11 points" in done.stdout


def test_a_zip_holds_the_same(tmp_path: Path, bundle: Path) -> None:
    out = tmp_path / "course.zip"
    assert call("release", out, "--chapters", "03-05").exit_code == 0
    inside = {name for name in zipfile.ZipFile(out).namelist() if not name.endswith("/")}
    assert inside == {f"course/{path.relative_to(bundle)}" for path in bundle.rglob("*")
                      if path.is_file() and path.suffix != ".pyc"}  # commands ran in the bundle
    assert list(tmp_path.iterdir()) == [out]


def test_what_makes_no_sense_gets_one_sentence(tmp_path: Path) -> None:
    assert chapters_in("3, 05-06") == {"03", "05", "06"}
    for words, says in (([], "is there already"), (["--chapters", "all"], "chapters are named as"),
                        (["--chapters", "77"], "no exercises of chapters 77"),
                        (["--chapters", "6-3"], "from the first to the last, not 6-3"),
                        (["--seed", "3"], "add --gradescope")):
        folder = tmp_path / "new" if words else tmp_path
        assert_bad_input(call("release", folder, *words), says)
