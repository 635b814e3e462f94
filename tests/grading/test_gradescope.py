"""Gradescope's autograder, run as Gradescope runs it: from its zip, by its scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dtlab import ConfigError
from dtlab.cli import app
from dtlab.grading.isolation import choose_sandbox

ROOT = Path(__file__).resolve().parents[2]
STUB, SOLUTION = (ROOT / folder / "00_welcome.ipynb" for folder in ("exercises", "solutions"))


@pytest.fixture(scope="module")
def autograder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder /autograder of the image, without what setup.sh installs."""
    try:
        choose_sandbox("bubblewrap")
    except ConfigError as error:
        pytest.skip(str(error))
    root = tmp_path_factory.mktemp("autograder")
    out = root / "autograder.zip"
    result = CliRunner().invoke(app, ["release", str(out), "--gradescope", "--chapters", "00",
                                      "--seed", "17"])
    assert result.exit_code == 0, result.output
    with zipfile.ZipFile(out) as archive:
        archive.extractall(root / "source")
    return root


def results(root: Path, *submitted: tuple[str, str]) -> dict:
    """What the autograder says of a submission of these files (name, text)."""
    for old in (root / "submission").glob("*"):
        old.unlink()
    (root / "submission").mkdir(exist_ok=True)
    for name, text in submitted:
        (root / "submission" / name).write_text(text)
    env = os.environ | {"AUTOGRADER_ROOT": str(root), "DTLAB_PYTHON": sys.executable,
                        "PYTHONPATH": str(root / "source")}
    script = root / "source" / "run_autograder"
    subprocess.run(["sh", str(script)], env=env, check=True, timeout=100,
                   cwd=root)
    return json.loads((root / "results" / "results.json").read_text())


def test_a_full_a_stub_and_a_broken_submission_get_their_points(autograder: Path) -> None:
    full = results(autograder, ("x.ipynb", SOLUTION.read_text()))
    assert full["score"] == sum(test["max_score"] for test in full["tests"]) == 8
    stub = results(autograder, ("x.ipynb", STUB.read_text()))
    assert stub["score"] == 0
    assert "Not written yet" in json.dumps(stub)
    broken = results(autograder, ("x.ipynb", "{"))
    assert broken["score"] == 0
    assert broken["output"].startswith("x.ipynb is not a notebook")
    assert "00_welcome is not there" in results(autograder)["output"]


def test_the_zip_holds_what_its_scripts_need_and_the_seed(autograder: Path) -> None:
    source = autograder / "source"
    assert json.loads((source / "settings.json").read_text()) == {
        "seed": 17, "notebooks": ["00_welcome"]}
    assert [path.name for path in (source / "course").iterdir()] == ["00_welcome.ipynb"]
    for name in ("setup.sh", "run_autograder", "pyproject.toml", "constraints.txt",
                 "dtlab/grading/pages/learner.html"):
        assert (source / name).exists()
    subprocess.run(["sh", "-n", str(source / "setup.sh")], check=True)
