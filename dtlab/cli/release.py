"""`dtlab release`: what a teacher hands out, without solutions and hidden tests."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from dtlab.cli.errors import with_exit_codes
from dtlab.cli.grade import warn_of_short_seed
from dtlab.errors import ConfigError
from dtlab.grading.isolation import PACKAGE

ROOT = PACKAGE.parent
MANIFEST = "SHA256SUMS"
# Beside the notebooks: what `make lab` needs. No tests, no solutions.
_KEPT = ("LICENSE", "pyproject.toml", "constraints.txt", "environment.yml", "scripts/setup.sh",
         "scripts/setup.py", "docs/reading_a_grade.md", "docs/self_check.yml")
_README = """# dtlab

You need Linux, Python 3.11 or newer, and make; two cores and no GPU are enough.

    make lab     # builds .venv (once, about 2 GB), then opens your copy of the course in JupyterLab

Each chapter in `notebooks/` comes before the exercises of its number in `exercises/`.
`source .venv/bin/activate; dtlab grade exercises/NAME.ipynb --sandbox none` says how many points
a notebook of yours earns; docs/reading_a_grade.md says how to read that.
"""
_MAKEFILE = """export PYTHON
lab: ## set everything up and open the course (ARGS=--no-browser: only print its address)
\t@sh scripts/setup.sh
\t@.venv/bin/dtlab lab $(ARGS)
"""
_LEFT_OUT = re.compile(r"__pycache__|\.pyc$|\.ipynb_checkpoints")


@with_exit_codes
def release(
    out: Annotated[Path, typer.Argument(help="A new folder, or a zip, for learners.")],
    chapters: Annotated[str, typer.Option(
        help="As 03-06 or 03,05 (default: all).", show_default=False)] = "00-99",
    gradescope: Annotated[bool, typer.Option(
        "--gradescope", help="Write Gradescope's autograder (a zip) instead.")] = False,
    seed: Annotated[int | None, typer.Option(
        min=1, max=10**12, help="With --gradescope: the class's own hidden inputs.")] = None,
) -> None:
    """Write the learners' bundle: chapters, exercises and the package, without solutions and hidden
    tests. `sha256sum -c SHA256SUMS` in it proves that it is whole."""
    if gradescope:
        warn_of_short_seed(seed)
        count = write_autograder(out, chapters, seed)
        typer.echo(f"{out}: {count} files; upload it as the autograder of a programming assignment")
        return
    if seed is not None:
        raise ConfigError("--seed is the autograder's: add --gradescope")
    count = write_bundle(out, chapters)
    typer.echo(f"{out}: {count} files; in it, `make lab` opens the course")


def write_autograder(out: Path, chapters: str, seed: int | None) -> int:
    """Write Gradescope's autograder for these chapters; returns how many files are in it. It has
    the solutions: it is for Gradescope only."""
    if out.suffix != ".zip" or out.exists():
        raise ConfigError(f"name a new zip for the autograder, not {out}")
    wanted = chapters_in(chapters)
    course = [file for file in sorted((ROOT / "solutions").glob("*.ipynb"))
              if file.name[:2] in wanted]
    if not course:
        raise ConfigError(f"no solutions of chapters {chapters} are in {ROOT / 'solutions'}")
    settings = {"seed": seed, "notebooks": [file.stem for file in course]}
    package = ("dtlab/", "pyproject", "constraints", "LICENSE")
    names = ["README.md", *sorted(n for n in _names(set()) if n.startswith(package))]
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.write(ROOT / name, name)
        for file in [*course, *(ROOT / "solutions" / "mistakes").glob("*.py")]:
            archive.write(file, f"course/{file.relative_to(ROOT / 'solutions')}")
        for file in sorted((PACKAGE / "grading" / "autograder").iterdir()):
            archive.write(file, file.name)
        archive.writestr("settings.json", json.dumps(settings))
        return len(archive.namelist())


def write_bundle(out: Path, chapters: str) -> int:
    """Write the bundle; returns how many files are in it."""
    if out.exists():
        raise ConfigError(f"{out} is there already: name a new folder or zip")
    wanted = chapters_in(chapters)
    folder = out.with_suffix("") if out.suffix == ".zip" else out
    if folder.exists():
        raise ConfigError(f"{folder} is there already, and the zip is made from it: remove it")
    names = sorted(_names(wanted))
    if not any(name.startswith("exercises/") for name in names):
        raise ConfigError(f"no exercises of chapters {chapters} are in {ROOT / 'exercises'}")
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
        shutil.copymode(ROOT / name, target)
    (folder / "README.md").write_text(_README, "utf-8")
    (folder / "Makefile").write_text(_MAKEFILE)
    names = sorted([*names, "README.md", "Makefile"])
    (folder / MANIFEST).write_text("".join(
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names))
    if out.suffix == ".zip":
        shutil.make_archive(str(folder), "zip", folder.parent, folder.name)
        shutil.rmtree(folder)
    return len(names) + 1


def chapters_in(text: str) -> set[str]:
    """The chapters that "03-06" or "03,05" names, in two digits."""
    found: set[str] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,2})(?:\s*-\s*(\d{1,2}))?\s*", part)
        if match is None:
            raise ConfigError(f"chapters are named as 03-06 or 03,05, not {text!r} (04b comes "
                              f"with 04)")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"chapters are named from the first to the last, not {part.strip()}")
        found |= {f"{number:02}" for number in range(first, last + 1)}
    return found


def _names(chapters: set[str]) -> Iterator[str]:
    """The files of the bundle, below the course's folder."""
    yield from (name for name in _KEPT if (ROOT / name).exists())
    for file in PACKAGE.rglob("*"):
        name = str(file.relative_to(ROOT))
        if file.is_file() and not _LEFT_OUT.search(name):
            yield name
    for folder in ("notebooks", "exercises"):
        for file in (ROOT / folder).rglob("*"):
            named = re.match(r"\d\d", file.name)
            if file.is_file() and not _LEFT_OUT.search(str(file)) and (
                    named is None or named[0] in chapters):
                yield str(file.relative_to(ROOT))
