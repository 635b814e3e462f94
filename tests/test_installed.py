"""Installed from a wheel, the course comes along: by an ordinary user, away from any checkout."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps",
                    "--no-build-isolation", "-w", str(folder), str(ROOT)], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def home(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A learner's folder; what is installed beside it can't be written."""
    folder = tmp_path_factory.mktemp("home")
    installed = folder.parent / "installed"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target",
                    str(installed), str(wheel)], check=True)
    subprocess.run(["chmod", "-R", "a-w", str(installed)], check=True)
    return folder


def ordinary_user() -> list[str]:
    """In front of a command: without root's rights."""
    user = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    if os.geteuid() == 0 and not subprocess.run([*user, "true"], capture_output=True).returncode:
        return user
    return []


def environment(home: Path) -> dict[str, str]:
    needed = [path for path in sys.path if path.endswith("site-packages")]
    kept = {name: value for name, value in os.environ.items()
            if name in ("PATH", "LANG", "LD_LIBRARY_PATH")}
    return kept | {"HOME": str(home), "DTLAB_NO_BROWSER": "1", "PYTHONDONTWRITEBYTECODE": "1",
                   "PYTHONPATH": os.pathsep.join([str(home.parent / "installed"), *needed])}


def call(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ordinary_user(), sys.executable, "-m", "dtlab", *words], cwd=home,
                          env=environment(home), capture_output=True, text=True, timeout=100)


def test_a_wheel_holds_chapters_and_exercises_and_no_solution(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for folder in ("notebooks", "exercises"):
        ours = {path.name for path in (ROOT / folder).glob("*.ipynb")}
        assert ours <= {Path(name).name for name in names
                        if name.startswith(f"dtlab/course/{folder}/")}
    assert not [name for name in names if "solution" in name or ".ipynb_checkpoints" in name]
    assert wheel.stat().st_size < 25e6


@pytest.mark.slow
def test_the_course_opens(home: Path) -> None:
    lab = subprocess.Popen([*ordinary_user(), sys.executable, "-m", "dtlab", "lab"], cwd=home,
                           env=environment(home), stdout=subprocess.PIPE, text=True,
                           start_new_session=True)
    try:
        assert lab.stdout is not None
        said = lab.stdout.readline() + lab.stdout.readline()
        address = re.search(r"http://127.0.0.1:\d+/lab/tree/notebooks/\S+\?token=\w+", said)
        assert address, said
        assert f"Your course is in {home}/my_course" in said
        first = address[0].replace("/lab/tree/", "/api/contents/").replace("?", "?content=0&")
        assert "/notebooks/00_welcome.ipynb?" in first
        for _ in range(300):
            try:
                with urllib.request.urlopen(first, timeout=5) as answer:
                    assert json.load(answer)["name"] == "00_welcome.ipynb"
                    break
            except OSError:
                time.sleep(0.1)
        else:
            pytest.fail("JupyterLab did not come up within 30 s")
    finally:
        os.killpg(lab.pid, signal.SIGTERM)
        lab.wait(20)


@pytest.mark.slow
def test_the_commands_work_from_there(home: Path) -> None:
    doctor = call(home, "doctor", "--json")
    assert json.loads(doctor.stdout)["ok"], doctor.stdout
    simulated = call(home, "simulate", "all_reduce", "-n", "1MB", "--json")
    assert simulated.returncode == 0, simulated.stderr
    assert "ring" in simulated.stdout
    mine = home / "exercises.ipynb"
    mine.write_bytes((ROOT / "exercises" / "00_welcome.ipynb").read_bytes())
    graded = call(home, "grade", str(mine), "--json", "--sandbox", "none")
    assert graded.returncode == 1, graded.stderr
    (report,) = json.loads(graded.stdout)
    assert (report["chapter"], report["points"], report["max_points"]) == ("00_welcome", 0, 8)
    refused = call(home, "lab", "--originals")
    assert refused.returncode == 2
    assert "--originals is for a clone" in refused.stderr
