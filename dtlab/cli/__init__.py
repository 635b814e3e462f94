"""The command line: `dtlab doctor`, `lab`, `demo`, `simulate`, `bench`, `plan`, `train`, `testbed`,
`grade`, `release`, `show`.

Each command stands in a file of its own and imports what it needs when it runs. Exit codes, the
same for all: 0, fine; 1, what was asked about failed (the doctor found a fault, a grade below
full, a run that broke); 2, the question itself makes no sense (an unknown option, a file that is
no notebook); 130, interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

import dtlab
from dtlab.cli import (
    bench,
    demo,
    doctor,
    grade,
    lab,
    plan,
    release,
    show_published,
    simulate,
    testbed,
    train,
)
from dtlab.cli.errors import DEBUG_VARIABLE

app = typer.Typer(
    name="dtlab",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 fine; 1 what was asked about failed; 2 bad input; 130 interrupted.",
)
app.command(name="doctor")(doctor.doctor)
app.command(name="lab")(lab.lab)
app.command(name="demo")(demo.demo)
app.command(name="simulate")(simulate.simulate)
app.add_typer(bench.app, name="bench")
app.command(name="plan")(plan.plan)
app.command(name="train")(train.train)
app.command(name="testbed", context_settings={
    "ignore_unknown_options": True, "allow_interspersed_args": False})(testbed.on_testbed)
app.command(name="grade")(grade.grade)
app.command(name="release")(release.release)
app.add_typer(show_published.app, name="show")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dtlab {dtlab.__version__}")
        raise typer.Exit


@app.callback()
def dtlab_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True,
                           help="Print the version and stop.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (anywhere in the line).")
    ] = False,
) -> None:
    """Distributed training, written once: run it on processes, on a simulated cluster, on GPUs."""
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


def main() -> None:
    """What the `dtlab` script calls."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may lack ✓ or µ
            stream.reconfigure(errors="replace")
    words = sys.argv[1:]
    if "--debug" in words:  # typer takes it before the command only; people add it at the end
        words = ["--debug", *(word for word in words if word != "--debug")]
    app(words)
