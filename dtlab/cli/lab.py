"""`dtlab lab`: the course, open in JupyterLab."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import dtlab
from dtlab.cli.polite import politely
from dtlab.errors import ConfigError


def course_folder(start: Path | None = None) -> Path:
    """The checkout that holds notebooks/: above `start`, above here, or around this package."""
    package = Path(dtlab.__file__).resolve().parent
    for begin in (start, Path.cwd(), package) if start else (Path.cwd(), package):
        assert begin is not None
        for folder in (begin.resolve(), *begin.resolve().parents):
            if (folder / "dtlab" / "comm.py").exists() and any(folder.glob("notebooks/*.ipynb")):
                return folder
    raise ConfigError(
        "the course's notebooks are not here: they live in dtlab's repository, not in the "
        "installed package; clone it and run `make lab` there"
    )


def command_line(course: Path, browser: bool, port: int | None) -> list[str]:
    """How JupyterLab is started: on loopback, at the first chapter."""
    first = min(course.glob("notebooks/*.ipynb")).relative_to(course)
    words = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={course}",
             f"--LabApp.default_url=/lab/tree/{first.as_posix()}", "--log-level=WARN"]
    if port is not None:
        words.append(f"--ServerApp.port={port}")
    if not browser or os.environ.get("DTLAB_NO_BROWSER") == "1":
        words.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        words.append("--allow-root")  # in a container, root is often the only user there is
    return words


@politely
def lab(
    browser: Annotated[
        bool, typer.Option(help="Open it in the browser; DTLAB_NO_BROWSER=1 turns it off too.")
    ] = True,
    port: Annotated[int | None, typer.Option(help="The port to listen on, if it is free.")] = None,
) -> None:
    """Open the course in JupyterLab, on this machine only (loopback, with a token)."""
    course = course_folder()
    words = command_line(course, browser, port)
    typer.echo(f"Opening the course in {course}; Ctrl-C here ends it.")
    sys.stdout.flush()
    os.chdir(course)
    os.execv(words[0], words)
