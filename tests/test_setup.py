"""`make setup` on a machine that is not as it should be: one clear sentence, nothing half made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files that set-up reads, in a folder of their own without .venv."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "dtlab").mkdir()
    (tmp_path / "dtlab" / "__init__.py").touch()
    return tmp_path


def make(folder: Path, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        ["make", "setup"], cwd=folder, capture_output=True, text=True, timeout=100,
        stdin=subprocess.DEVNULL, env=os.environ | {"PYTHON": sys.executable} | environment,
    )
    return done.returncode, done.stderr


def complaint(folder: Path, **environment: str) -> str:
    """What a set-up that fails says besides make's own last line: one sentence."""
    code, errors = make(folder, **environment)
    assert code != 0
    lines = [line for line in errors.splitlines() if not line.startswith("make")]
    assert len(lines) == 1, errors
    return lines[0]


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_an_old_python_is_named_with_its_version(clone: Path) -> None:
    old = script(clone / "old", 'case "$*" in *version.split*) echo 3.9.2;; *) exit 1;; esac')
    said = complaint(clone, PYTHON=old)
    assert "needs Python 3.11" in said
    assert "3.9.2" in said
    assert not (clone / ".venv").exists()


def test_a_python_that_is_not_there_is_named_and_a_machine_without_any_told_how_to_get_one(
    clone: Path
) -> None:
    assert "PYTHON=/nowhere/python3.12" in complaint(clone, PYTHON="/nowhere/python3.12")
    folder = clone / "bin"
    folder.mkdir()
    for name in ("sh", "make", "dirname"):
        (folder / name).symlink_to(shutil.which(name) or name)
    assert "none is installed" in complaint(clone, PYTHON="", PATH=str(folder))


@pytest.mark.slow
def test_without_network_it_says_so_and_leaves_nothing_half_made(clone: Path) -> None:
    stand_in(clone, "Successfully installed", 0)
    (clone / ".venv" / "dtlab-under-way").touch()  # an earlier attempt was cut off
    closed = "http://127.0.0.1:9/simple"  # the port "discard": nobody listens
    said = complaint(clone, PIP_INDEX_URL=closed, PIP_EXTRA_INDEX_URL="", PIP_FIND_LINKS="",
                     PIP_CONFIG_FILE=os.devnull, PIP_RETRIES="1", PIP_NO_CACHE_DIR="1")
    assert "can't reach its package index" in said
    assert not (clone / ".venv").exists()
    assert not (clone / "calls").exists(), "what was half made must not be used"


def stand_in(clone: Path, says: str, code: int) -> None:
    """A .venv that answers like a good one, and whose pip prints `says` and ends with `code`."""
    (clone / ".venv" / "bin").mkdir(parents=True)
    installs = f'*"-m pip install"*) echo "{says}"; exit {code};;'
    script(clone / ".venv" / "bin" / "python", f'echo "$*" >> calls\ncase "$*" in {installs} esac')


def test_a_full_disk_is_named(clone: Path) -> None:
    stand_in(clone, "ERROR: Could not install packages due to an OSError: "
                    "[Errno 28] No space left on device", 1)
    assert "disk is full" in complaint(clone)


def test_another_failure_of_pip_points_to_its_log_and_is_tried_again(clone: Path) -> None:
    stand_in(clone, "ERROR: something new", 1)
    assert str(clone / ".venv.log") in complaint(clone)
    assert (clone / ".venv.log").read_text() == "ERROR: something new\n"
    shutil.rmtree(clone / ".venv")
    stand_in(clone, "Successfully installed", 0)
    assert make(clone)[0] == 0


def test_a_second_call_installs_nothing_until_the_pins_change(clone: Path) -> None:
    stand_in(clone, "Successfully installed", 0)

    def installs() -> int:
        return (clone / "calls").read_text().count("pip install")

    assert make(clone)[0] == 0
    assert make(clone)[0] == 0
    assert installs() == 1
    with (clone / "constraints.txt").open("a") as pins:
        pins.write("another==1.0\n")
    assert make(clone)[0] == 0
    assert installs() == 2


def test_an_environment_that_was_moved_is_not_used(clone: Path) -> None:
    stand_in(clone, "Successfully installed", 0)
    assert make(clone)[0] == 0
    stamp = clone / ".venv" / "dtlab-ready"
    stamp.write_text(stamp.read_text().replace(str(clone), "/where/it/was"))
    make(clone, PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull)
    assert (clone / "calls").read_text().count("pip install") == 1
