"""`dtlab grade`: points for one notebook, or for a class's."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer
from rich.progress import track

from dtlab.cli import show
from dtlab.cli.errors import BAD_INPUT, FAILED, with_exit_codes
from dtlab.errors import ConfigError

if TYPE_CHECKING:
    from dtlab.grading.notebook import NotebookReport


@with_exit_codes
def grade(
    notebooks: Annotated[list[Path] | None, typer.Argument(
        help="Learners' notebooks, or folders of them.")] = None,
    out: Annotated[Path | None, typer.Option(
        help="Grade one folder as a class, and write pages and tables into this folder.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="With --out: how many at a time.")] = 1,
    seed: Annotated[int | None, typer.Option(
        min=1, max=10**12, help="The class's own hidden inputs (default: the course's).")] = None,
    sandbox: Annotated[str | None, typer.Option(
        help="bubblewrap, nobody, or none: for code that you trust.")] = None,
    course: Annotated[Path | None, typer.Option(
        help="The folder of the course's own notebooks, if it isn't found.")] = None,
    deadline: Annotated[str | None, typer.Option(
        help="With --out: mark what was handed in after 2026-12-01 23:59, or after this day.")
    ] = None,
    names: Annotated[Path | None, typer.Option(
        help="With --out: a file of all learners' names, one a line; absentees get a row.")] = None,
    attack: Annotated[bool, typer.Option(
        "--attack", help="Grade no one: try attacks on this machine's sandbox.")] = False,
    only: Annotated[str, typer.Option(help="With --attack: those with this in their name.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list.")] = False,
    as_csv: Annotated[bool, typer.Option(
        "--csv", help="Print CSV: one line per notebook.")] = False,
) -> None:
    """Grade notebooks with the course's own tests, hidden ones included.

    A learner's code runs in a sandbox; only its answers count. Exit code 0: full points, or with
    --out any; 1: fewer; 2: a file could not be graded (its line says why; the others are still
    graded).
    """
    if as_json and as_csv:
        raise ConfigError("--json and --csv are two forms of the same: choose one")
    if attack:
        _try_attacks(sandbox, only, course)
        return
    warn_of_short_seed(seed)
    if only:
        raise ConfigError("--only chooses among attacks: add --attack")
    if not notebooks:
        raise ConfigError("name the notebooks to grade, or folders of them")
    if out is None and (jobs > 1 or deadline is not None or names is not None):
        raise ConfigError("--jobs, --deadline and --names are for a class: add --out, a folder for "
                          "results")
    if out is not None:
        _grade_class(notebooks, out, jobs, seed, sandbox, course, last_moment(deadline),
                     read_names(names))
        return
    _grade_each(notebooks, seed, sandbox, course, as_json, as_csv)


def warn_of_short_seed(seed: int | None) -> None:
    """An answer has time to try the inputs of some hundred thousand seeds."""
    if seed is not None and seed < 10**9:
        typer.echo(f"dtlab: an answer can guess the seed {seed} by trying: draw one of ten digits "
                   f"or more", err=True)


def read_names(path: Path | None) -> list[str]:
    """The names in a file, one a line, as hand-ins spell them."""
    from dtlab.grading.submissions import plain_name

    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8: save it as plain text in UTF-8") from None
    return [plain_name(line) for line in lines if line.strip()]


def last_moment(text: str | None) -> datetime | None:
    """The deadline that `text` says, by this machine's clock; of a day, its end. A time zone may
    follow, such as +01:00 or Europe/Berlin."""
    if text is None:
        return None
    day, _, rest = text.strip().partition(" ")
    time, _, zone = rest.partition(" ") if re.match(r"\d\d?:", rest) else ("", "", rest)
    try:
        moment = datetime.strptime(f"{day} {time or '23:59:59'}",
                                   "%Y-%m-%d %H:%M" if time else "%Y-%m-%d %H:%M:%S")
        if re.fullmatch(r"[+-]\d\d:?\d\d", zone):
            moment = moment.replace(tzinfo=datetime.strptime(zone, "%z").tzinfo)
        elif zone:
            moment = moment.replace(tzinfo=ZoneInfo(zone))
    except (ValueError, OSError, ZoneInfoNotFoundError):
        raise ConfigError(f"--deadline is written 2026-12-01 23:59, or 2026-12-01, and a time zone "
                          f"may follow (+01:00, Europe/Berlin); not {text!r}") from None
    here = moment.astimezone()
    typer.echo(f"dtlab: the deadline is {here:%Y-%m-%d %H:%M} {here.tzname()} (UTC{here:%z}), "
               f"this machine's time zone", err=True)
    return here.replace(tzinfo=None)


def _grade_class(folders: list[Path], out: Path, jobs: int, seed: int | None, sandbox: str | None,
                 course: Path | None, deadline: datetime | None, names: list[str]) -> None:
    from dtlab.grading.class_grading import grade_class
    from dtlab.grading.class_report import write_results

    if not folders[0].exists():
        raise ConfigError(f"{folders[0]} does not exist")
    if len(folders) != 1 or not folders[0].is_dir():
        raise ConfigError("with --out, name the one folder in which a class's submissions are")
    if out.is_file():
        raise ConfigError(f"{out} is a file: name a folder for results")

    try:
        graded = grade_class(folders[0], out, jobs=jobs, seed=seed, sandbox=sandbox, course=course,
                             deadline=deadline, watch=_watched)
        write_results(graded, out, seed, names)
    except (KeyboardInterrupt, OSError):
        typer.echo(f"dtlab: stopped; what is graded is kept in {out}, and the same command goes on "
                   f"from there", err=True)
        raise
    failed = [each for each in graded if each.report.error]
    learners = len({each.hand_in.learner for each in graded})
    typer.echo(f"hand-ins: {len(graded)}, of learners: {learners}, not gradable: {len(failed)}; "
               f"see {out / 'index.html'}")
    strangers = {each.hand_in.learner for each in graded} - set(names)
    if names and strangers:
        typer.echo(f"dtlab: handed in, but not in --names as they are spelled here: "
                   f"{', '.join(sorted(strangers, key=str.casefold))}", err=True)
    _complain([each.report for each in failed])


def _watched(each: Iterable[Any], total: int) -> Iterable[Any]:
    """A progress bar in a terminal; elsewhere, a line for each tenth that is done."""
    if sys.stderr.isatty():
        yield from track(each, "grading", total, console=show.progress_console(), transient=True)
        return
    for number, one in enumerate(each, 1):
        yield one
        if total >= 10 and number * 10 // total > (number - 1) * 10 // total:
            typer.echo(f"graded {number} of {total}", err=True)


def _grade_each(paths: list[Path], seed: int | None, sandbox: str | None, course: Path | None,
                as_json: bool, as_csv: bool) -> None:
    from dtlab.grading.class_grading import batches, grade_hand_ins
    from dtlab.grading.class_report import class_table, to_csv
    from dtlab.grading.isolation import choose_sandbox
    from dtlab.grading.submissions import find_each

    box = choose_sandbox(sandbox)
    with TemporaryDirectory() as unpacked:
        found = find_each(paths, Path(unpacked))
        graded_in_turn = (one for batch in batches(found)
                          for one in grade_hand_ins(batch, course, seed, box).items())
        report_of = dict(_watched(graded_in_turn, len(found)))
        reports = [report_of[each] for each in found]
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
    _complain([report for report in reports if report.error])
    if any(report.points < report.max_points for report in reports):
        raise typer.Exit(FAILED)


def _try_attacks(sandbox: str | None, only: str, course: Path | None) -> None:
    from dtlab.grading.isolation import PACKAGE

    if not (PACKAGE.parent / "tests" / "gallery").is_dir():
        raise ConfigError("the attacks are among the project's tests: try --attack in a checkout "
                          "of it")
    sys.path.insert(0, str(PACKAGE.parent))
    gallery = importlib.import_module("tests.gallery.run")
    count = sum(only in attack.name for attack in gallery.EVERYTHING)
    if not count:
        raise ConfigError(f"no attack has {only!r} in its name")
    failed = 0
    for number, attack in enumerate(gallery.run_gallery(sandbox, [only], course), 1):
        failed += not attack.held
        typer.echo(f"{number:3} of {count}  {'held  ' if attack.held else 'FAILED'}  "
                   f"{attack.points:g} of {attack.max_points:g} points, "
                   f"next {attack.next_points:g} of {attack.next_max:g}, "
                   f"{attack.seconds:3.0f} s  {attack.name}"
                   + (f": left {attack.left}" if attack.left else ""))
    typer.echo(f"{count - failed} of {count} as it should be: an attack earns nothing, leaves "
               "nothing, and changes no other grade")
    if failed:
        raise typer.Exit(FAILED)


def _complain(failed: list[NotebookReport]) -> None:
    """Name what could not be graded; then nothing else decides the exit code."""
    for report in failed:
        named = report.error.startswith(report.path)
        typer.echo("dtlab: " + report.error if named else f"dtlab: {report.path}: {report.error}",
                   err=True)
    if failed:
        raise typer.Exit(BAD_INPUT)
