"""A rank's exception on its way to the launcher.

The traceback travels as (file, line number, function) and gets its source lines only where it is
shown: a notebook's cells exist in the notebook's process alone.
"""

from __future__ import annotations

import contextlib
import linecache
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import cloudpickle

from dtlab.errors import DtlabError, RankDied, RankFailed, headline_of
from dtlab.tracebacks import LIBRARIES, ends_at_caller, shown_name, with_cell_names, without_middle

_OURS = str(Path(__file__).parent), contextlib.__file__
_BROKEN = ("Connection closed", "Connection reset", "Broken pipe", "gloo")  # Gloo's words
_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"


class ChainedException(NamedTuple):
    """One exception of a chain: how it follows from the one before, where it came from."""

    joint: str
    frames: list[tuple[str, int, str]]  # file, line number, function
    text: list[str]  # "ValueError: …"


class CapturedError(NamedTuple):
    """All that a rank says of its exception."""

    headline: str
    chain: list[ChainedException]
    pickled: bytes | None  # the exception itself, if it can travel
    secondary: bool  # perhaps only a consequence: a connection broke as another rank had ended


def capture(error: BaseException) -> CapturedError:
    """Describe `error`, in the rank where it was raised."""
    try:
        pickled = cloudpickle.dumps(error)
    except Exception:
        pickled = None
    headline = headline_of(error)
    secondary = isinstance(error, RankDied) or (
        isinstance(error, RuntimeError) and any(sign in headline for sign in _BROKEN))
    return CapturedError(headline, list(_chain(error, set())), pickled, secondary)


def _chain(error: BaseException, seen: set[int]) -> Iterator[ChainedException]:
    seen.add(id(error))
    joint, before = _CAUSE, error.__cause__
    if before is None and not error.__suppress_context__:
        joint, before = _CONTEXT, error.__context__
    if before is not None and id(before) not in seen:
        yield from _chain(before, seen)
    else:
        joint = ""
    alone = traceback.TracebackException(type(error), error, None)  # with a group's exceptions
    yield ChainedException(joint, _frames(error), list(alone.format(chain=False)))


def _frames(error: BaseException) -> list[tuple[str, int, str]]:
    """Return the learner's part of the traceback, without dtlab's own frames around it.

    Errors that dtlab raises on purpose end at the line that called dtlab.
    """
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    start = next((n for n, (file, _, _) in enumerate(frames) if not file.startswith(_OURS)),
                 len(frames))
    frames = frames[start:]
    if ends_at_caller(error):
        while frames and frames[-1][0].startswith(LIBRARIES):
            frames.pop()
    return frames


def rank_failed(rank: int, failure: CapturedError, dead: Sequence[int] = ()) -> RankFailed:
    """The error that the launcher raises for it. dead: ranks that have died, and may."""
    cause = _headline_with(failure, dead) if failure.secondary and dead else _cause(failure)
    if isinstance(cause, DtlabError):  # its words may name a notebook's cell
        cause.args = tuple(with_cell_names(arg) if isinstance(arg, str) else arg
                           for arg in cause.args)
    return RankFailed.from_rank(rank, cause, render(failure))


def _cause(failure: CapturedError) -> BaseException | str:
    """The exception itself, or its text if it can't be had."""
    if failure.pickled is not None:
        with contextlib.suppress(Exception):
            cause = cloudpickle.loads(failure.pickled)
            if isinstance(cause, BaseException):
                return cause
    return failure.headline


def _headline_with(failure: CapturedError, dead: Sequence[int]) -> str:
    kind, _, words = failure.headline.partition(": ")
    who = " and ".join(f"rank {number}" for number in dead)
    return (f"{kind}, after {who} had died; a rank that talks to one that may die must expect "
            f"that: wait with comm.wait_any, and catch RankDied\n{words}")


def render(failure: CapturedError) -> str:
    """The traceback as Python prints it, with source lines as this process knows them."""
    linecache.checkcache()
    lines = []
    for joint, frames, text in failure.chain:
        lines.append(joint)
        if frames:
            lines.append("Traceback (most recent call last):\n")
            story = traceback.StackSummary.from_list([
                (shown_name(file), number, function, linecache.getline(file, number))
                for file, number, function in frames]).format()  # repeated lines become one
            lines += without_middle(story)
        lines.extend(map(with_cell_names, text))
    return "".join(lines).lstrip("\n")
