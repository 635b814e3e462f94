"""`dtlab grade`: points for one notebook, or for a class's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from dtlab.cli import show
from dtlab.cli.errors import BAD_INPUT, FAILED, with_exit_codes
from dtlab.errors import ConfigError


def notebooks_in(paths: list[Path]) -> Iterator[Path]:
    """The files as given; of a folder, every notebook in it."""
    for path in paths:
        if path.is_dir():
            found = [file for file in sorted(path.rglob("*.ipynb"))
                     if ".ipynb_checkpoints" not in file.parts]  # JupyterLab's backups
            if not found:
                raise ConfigError(f"{path}: there is no notebook in this folder")
            yield from found
        else:
            yield path


@with_exit_codes
def grade(
    notebooks: Annotated[
        list[Path], typer.Argument(help="Learners' notebooks, or folders of them.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list.")] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV: one line per notebook.")
    ] = False,
) -> None:
    """Grade notebooks with the course's own tests, hidden ones included.

    A learner's code runs in a sandbox; only its answers count. Exit code 0: full points; 1: fewer;
    2: a file could not be graded (its line says why; the others are still graded).
    """
    from dtlab.grading.notebook import class_table, grade_many, to_csv

    if as_json and as_csv:
        raise ConfigError("--json and --csv are two forms of the same: choose one")
    paths = list(notebooks_in(notebooks))
    watched = track(paths, "grading", console=show.progress_console(), transient=True)
    reports = list(grade_many(watched))
    if as_json:
        show.json_out([report.to_dict() for report in reports])
    elif as_csv:
        typer.echo(to_csv(reports), nl=False)
    else:
        graded = [report for report in reports if not report.error]
        if len(graded) == 1:
            typer.echo(graded[0].to_text(show.console().width))
        elif graded:
            typer.echo(class_table(graded, show.console().width))
    failed = [report for report in reports if report.error]
    for report in failed:
        named = report.error.startswith(report.path)
        typer.echo("dtlab: " + report.error if named else f"dtlab: {report.path}: {report.error}",
                   err=True)
    if failed:
        raise typer.Exit(BAD_INPUT)
    if any(report.points < report.max_points for report in reports):
        raise typer.Exit(FAILED)
