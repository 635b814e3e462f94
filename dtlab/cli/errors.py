"""An error on the command line: one sentence, a meaningful exit code, no traceback."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from dtlab.errors import ConfigError, DtlabError, RankFailed
from dtlab.processes import torchrun

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # exit codes; 0 is fine
TELL_S = 15.0  # how long the other ranks of a host wait for its first to say what is wrong
DEBUG_VARIABLE = "DTLAB_DEBUG"  # set to 1: tracebacks are shown

P = ParamSpec("P")
R = TypeVar("R")


def with_exit_codes(command: Callable[P, R]) -> Callable[P, R]:
    """Return `command`, with every error turned into its sentence on stderr and its exit code."""

    @functools.wraps(command)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # `dtlab … | head`: the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise typer.Exit from None
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as error:
            if os.environ.get(DEBUG_VARIABLE) == "1":
                raise
            if not tells_errors():
                time.sleep(TELL_S)  # the end of the one that does ends this one
                raise typer.Exit(exit_code(error)) from None
            typer.echo(f"dtlab: {sentence(error)}", err=True)
            raise typer.Exit(exit_code(error)) from None

    return told


def speaks() -> bool:
    """Does this process talk to the person? Of torchrun's ranks, rank 0 alone does."""
    rank, _, _ = torchrun.started() or (0, 1, 0)
    return rank == 0


def tells_errors() -> bool:
    """Does this process say what is wrong? Of torchrun's ranks, the first of each host does."""
    _, _, on_host = torchrun.started() or (0, 1, 0)
    return speaks() or on_host == 0


def sentence(error: Exception) -> str:
    """Return the message for the user. dtlab's own errors are written for users already."""
    if isinstance(error, RankFailed) and isinstance(error.__cause__, ConfigError):
        return str(error.__cause__)  # bad input, which a rank has noticed
    if isinstance(error, DtlabError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the system says'}: {error.strerror}"
    if isinstance(error, ImportError):
        return f"{error}; `make setup` installs all that dtlab needs"
    kind = type(error).__name__
    return f"{kind}: {error} (this is a fault of dtlab itself; --debug shows where)"


def exit_code(error: Exception) -> int:
    """2 if the input was at fault, else 1."""
    at_fault = isinstance(error, (ConfigError, OSError)) and not isinstance(error, TimeoutError)
    return BAD_INPUT if at_fault else FAILED
