"""The command line: `dtlab doctor`, `lab`, `demo`, `simulate`, `bench`, `plan`, `train`, `testbed`,
`grade`, `release`, `show`.

Each command stands in a file of its own and imports what it needs when it runs. Exit codes, the
same for all: 0, fine; 1, what was asked about failed (the doctor found a fault, a grade below
full, a run that broke); 2, the question itself makes no sense (an unknown option, a file that is
no notebook); 130, interrupted.
"""

from __future__ import annotations

import ast
import io
import os
import sys
from importlib import import_module
from importlib.resources import files
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import dtlab

COMMANDS = {  # name: its file, and what stands there: a function, or an app of several commands
    "doctor": ("doctor", "doctor"), "lab": ("lab", "lab"), "demo": ("demo", "demo"),
    "simulate": ("simulate", "simulate"), "bench": ("bench", "app"), "plan": ("plan", "plan"),
    "train": ("train", "train"), "testbed": ("testbed", "on_testbed"), "grade": ("grade", "grade"),
    "release": ("release", "release"), "show": ("show_published", "app"),
}
SETTINGS = {"help_option_names": ["-h", "--help"]}
PASSED_ON = {"testbed": {"ignore_unknown_options": True, "allow_interspersed_args": False}}


class Commands(TyperGroup):
    """A command's file, which may import torch, is loaded when the command is called; the list of
    all takes each line from the file's docstring."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands, in the order in which they are listed."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command by its name, as far as the list of all needs it."""
        if cmd_name not in COMMANDS:
            return None
        source = files("dtlab.cli").joinpath(f"{COMMANDS[cmd_name][0]}.py").read_text("utf-8")
        text = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0].split("`: ")[1]
        return TyperCommand(cmd_name, help=text[0].upper() + text[1:])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that `args` begin with, whole."""
        self.commands = {each: TyperCommand(each) for each in COMMANDS}  # "Did you mean …?"
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and loaded(str(name)), rest


def loaded(name: str) -> Any:
    """A command with its options."""
    file, inside = COMMANDS[name]
    found = getattr(import_module(f"dtlab.cli.{file}"), inside)
    if isinstance(found, typer.Typer):
        found.info.context_settings = SETTINGS
        command: Any = get_command(found)
    else:
        one = typer.Typer(add_completion=False, rich_markup_mode="rich",
                          pretty_exceptions_enable=False)
        one.command(name=name, context_settings=SETTINGS | PASSED_ON.get(name, {}))(found)
        command = get_command(one)
    for each in (command, *getattr(command, "commands", {}).values()):  # break lines anew
        each.help = "\n\n".join(
            " ".join(part.split()) for part in (each.help or "").split("\n\n"))  # none with -OO
    return command


app = typer.Typer(
    name="dtlab",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings=SETTINGS,
    epilog="Exit codes: 0 fine; 1 what was asked about failed; 2 bad input; 130 interrupted.",
)


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
    debug: Annotated[bool, typer.Option(
        "--debug", help="Show the traceback of an error (anywhere in the line).")] = False,
) -> None:
    """Distributed training, written once: run it on processes, on a simulated cluster, on GPUs."""
    if debug:
        os.environ["DTLAB_DEBUG"] = "1"  # errors.DEBUG_VARIABLE


def main() -> None:
    """Run the command line: the entry point of the `dtlab` script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may lack ✓ or µ
            stream.reconfigure(errors="replace")
    words = sys.argv[1:]
    if "--debug" in words:  # typer takes it before the command only; people add it at the end
        words = ["--debug", *(word for word in words if word != "--debug")]
    try:
        app(words)
    except OSError as error:  # help and the version are no command's: see `with_exit_codes`
        from dtlab.cli.errors import exit_code, sentence

        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still to be written
        typer.echo(f"dtlab: {sentence(error)}", err=True)
        raise SystemExit(exit_code(error)) from None
