"""Gradescope's autograder, run as Gradescope runs it: from its zip, by its scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dtlab.cli import app

ROOT = Path(__file__).resolve().parents[2]
STUB, SOLUTION = (ROOT / folder / "00_welcome.ipynb" for folder in ("exercises", "solutions"))
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"  # root's, in the image
CLOSED = ("source/course/00_welcome.ipynb", "source/settings.json", "submission/x.ipynb",
          "source/dtlab/grading/exercises/hello_ranks.py")
SPY = """def hello(comm):
    import glob, os
    checks = glob.glob("{root}/venv/lib/*/site-packages/dtlab/grading/exercises/*.py")
    read = [file for file in [*{files!r}, *checks] if os.access(file, os.R_OK)]
    raise RuntimeError(f"user {{os.getuid()}} reads {{read}}")
"""


@pytest.fixture(scope="module")
def autograder() -> Iterator[Path]:
    """/autograder of an image, after its setup.sh. Only the libraries need not be downloaded: they
    lie in the image's Python already, as links to this one's files."""
    if os.geteuid():
        pytest.skip("Gradescope builds its image as root")
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    found = subprocess.run(["python3", "--version"], env={"PATH": PATH}, capture_output=True,
                           text=True, check=False).stdout
    if not found.startswith(f"Python {version}."):
        pytest.skip(f"the system has no Python {version}, to which these libraries belong")
    with tempfile.TemporaryDirectory(prefix="autograder-") as folder:
        root = Path(folder)
        root.chmod(0o755)  # as /autograder is
        out = root / "autograder.zip"
        result = CliRunner().invoke(app, ["release", str(out), "--gradescope", "--chapters", "00",
                                          "--seed", "17"])
        assert result.exit_code == 0, result.output
        with zipfile.ZipFile(out) as archive:
            archive.extractall(root / "source")
        image = root / "venv" / "lib" / f"python{version}"
        image.mkdir(parents=True)
        subprocess.run(["sh", "-c", 'cp -rl "$0" "$1" 2>/dev/null || cp -r "$0" "$1"',
                        Path(torch.__file__).parents[1], image], check=True)
        env = os.environ | {"AUTOGRADER_ROOT": str(root), "PATH": PATH}
        subprocess.run(["sh", str(root / "source" / "setup.sh")], check=True, timeout=300, env=env,
                       cwd=root / "source")
        yield root


@pytest.fixture(params=["bubblewrap", "nobody"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """PATH; without bubblewrap's namespaces, as in most containers, the answers run as nobody."""
    if request.param == "nobody":
        bwrap = tmp_path / "bwrap"
        bwrap.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
        bwrap.chmod(0o755)
    return f"{tmp_path}:{PATH}"


def results(root: Path, *submitted: tuple[str, str], path: str = PATH) -> dict:
    """What the autograder says of a submission of these files (name, text)."""
    for old in (root / "submission").glob("*"):
        old.unlink()
    (root / "submission").mkdir(exist_ok=True)
    for name, text in submitted:
        (root / "submission" / name).write_text(text)
    subprocess.run(["sh", str(root / "source" / "run_autograder")], check=True, timeout=100,
                   env={"AUTOGRADER_ROOT": str(root), "PATH": path}, cwd=root / "source")
    return json.loads((root / "results" / "results.json").read_text())


def test_an_answer_can_read_no_test(autograder: Path, path: str, tmp_path: Path) -> None:
    notebook = json.loads(SOLUTION.read_text())
    spy = SPY.format(root=autograder, files=[str(autograder / each) for each in CLOSED])
    for cell in notebook["cells"]:
        if "def hello(" in "".join(cell["source"]):
            cell["source"] = spy
    told = results(autograder, ("x.ipynb", json.dumps(notebook)), path=path)
    assert told["output"] == ""
    first = told["tests"][0]
    assert first["score"] == 0
    user = 65534 if (tmp_path / "bwrap").exists() else 0  # 0 in a namespace, without capabilities
    assert f"user {user} reads []" in first["output"]
    assert told["score"] == 4  # the other exercise's points


def test_a_full_a_stub_and_a_broken_submission_get_their_points(autograder: Path) -> None:
    full = results(autograder, ("x.ipynb", SOLUTION.read_text()))
    assert full["score"] == sum(test["max_score"] for test in full["tests"]) == 8
    stub = results(autograder, ("x.ipynb", STUB.read_text()))
    assert stub["score"] == 0
    assert "Not written yet" in json.dumps(stub)
    broken = results(autograder, ("x.ipynb", "{"))
    assert broken["score"] == 0
    assert broken["output"].startswith("x.ipynb: it is not a notebook")
    assert "00_welcome is not there" in results(autograder)["output"]


def test_the_zip_holds_what_its_scripts_need_and_the_seed(autograder: Path) -> None:
    source = autograder / "source"
    assert json.loads((source / "settings.json").read_text()) == {
        "seed": 17, "notebooks": ["00_welcome"]}
    course = sorted(path.name for path in (source / "course").iterdir())
    assert course == ["00_welcome.ipynb", "mistakes"]
    for name in ("setup.sh", "run_autograder", "pyproject.toml", "constraints.txt",
                 "dtlab/grading/pages/learner.html"):
        assert (source / name).exists()
