"""`dtlab lab`: the course, open in JupyterLab."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

import dtlab
from dtlab.cli.errors import with_exit_codes
from dtlab.errors import ConfigError

COPY = "my_course"  # the learner's folder: in the checkout, where git ignores it, or else here
INSTALLED = Path(dtlab.__file__).resolve().parent / "course"  # of a wheel
COPIED = ("notebooks/*.ipynb", "notebooks/cheat_sheet.md", "notebooks/glossary.md",
          "exercises/*.ipynb")


def course_folder(start: Path | None = None) -> Path:
    """The checkout that holds notebooks/: above `start`, above here, or around this package; or
    what a wheel has brought along."""
    package = Path(dtlab.__file__).resolve().parent
    for begin in (start, Path.cwd(), package) if start else (Path.cwd(), package):
        assert begin is not None
        for folder in (begin.resolve(), *begin.resolve().parents):
            if (folder / "dtlab" / "comm.py").exists() and any(folder.glob("notebooks/*.ipynb")):
                return folder
    if any(INSTALLED.glob("notebooks/*.ipynb")):
        return INSTALLED
    raise ConfigError("the course's notebooks are not here: clone dtlab's repository and run "
                      "`make lab` there, or install its wheel")


def copy_course(course: Path) -> tuple[Path, list[str]]:
    """Copy chapters and exercises for the learner; return the copy's folder, and the names of those
    revised since the learner changed the copy. Files that the learner changed stay as they are."""
    mine, revised = copy_of(course), []
    mine.mkdir(exist_ok=True)
    record = mine / ".copied.json"  # what was copied: name → hash
    copied = json.loads(record.read_text("utf-8")) if record.exists() else {}
    for original in sorted(path for pattern in COPIED for path in course.glob(pattern)):
        name = original.relative_to(course).as_posix()
        copy, now = mine / name, _hash(original)
        if not copy.exists() or (copied.get(name) != now and _hash(copy) == copied.get(name)):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(original, copy)
            copied[name] = now
        elif copied.get(name) != now:
            revised.append(name)
    record.write_text(json.dumps(copied, indent=1))
    return mine, revised


def copy_of(course: Path) -> Path:
    """Return the folder of the learner's own copy of this course."""
    return (Path.cwd() if course == INSTALLED else course) / COPY


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def command_line(folder: Path, browser: bool, port: int) -> list[str]:
    """Return the command to start JupyterLab at `folder`'s first chapter, with `lab_config.py`."""
    words = [sys.executable, "-m", "jupyterlab",
             f"--config={Path(__file__).with_name('lab_config.py')}",
             f"--ServerApp.root_dir={folder}", f"--ServerApp.port={port}",
             f"--LabApp.default_url={first_page(folder)}", "--log-level=ERROR"]
    if not browser or os.environ.get("DTLAB_NO_BROWSER") == "1":
        words.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        words.append("--allow-root")  # in a container, root is often the only user there is
    return words


def first_page(folder: Path) -> str:
    """The address, on the server, of the first chapter in `folder`."""
    return f"/lab/tree/{min(folder.glob('notebooks/*.ipynb')).relative_to(folder).as_posix()}"


def free_port(first: int = 8888) -> int:
    """Return the first port from `first` on that no process listens on."""
    for port in range(first, min(first + 100, 2**16)):
        with socket.socket() as attempt:
            if attempt.connect_ex(("127.0.0.1", port)):
                return port
    raise ConfigError(f"the ports from {first} to {first + 99} are all taken; name one with --port")


@with_exit_codes
def lab(
    browser: Annotated[bool, typer.Option(
        help="Open it in the browser; DTLAB_NO_BROWSER=1 turns it off too.")] = True,
    port: Annotated[int, typer.Option(
        min=1, max=65535, help="The port to listen on, or the next that is free.")] = 8888,
    originals: Annotated[bool, typer.Option(
        "--originals", help="Open the course's own files, to edit them.")] = False,
) -> None:
    """Open your own copy of the course in JupyterLab: on loopback only, with a token."""
    folder = course_folder()
    if originals and folder == INSTALLED:
        raise ConfigError("--originals is for a clone of dtlab's repository: what pip has "
                          "installed is not for editing")
    if not originals:
        folder, revised = copy_course(folder)
        for name in revised:
            typer.echo(f"{name} has been revised since you began it; to get the new one, rename "
                       f"yours: {folder / name}")
    port = free_port(port)
    token = os.environ["JUPYTER_TOKEN"] = secrets.token_hex(24)
    words = command_line(folder, browser, port)
    typer.echo(f"Your course is in {folder}; Ctrl-C here ends it. If no browser opens, open\n"
               f"http://127.0.0.1:{port}{first_page(folder)}?token={token}")
    sys.stdout.flush()
    os.chdir(folder)
    os.execv(words[0], words)
