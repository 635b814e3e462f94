"""Where in the learner's own code something happened."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeVar

from dtlab.errors import DtlabError

PACKAGE = str(Path(__file__).parent)
# Not the learner's: dtlab, and what stands between it and them, as torch's modules do.
LIBRARIES = (PACKAGE, "<frozen ",
             *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
_MOST_CALLS = 20  # that a traceback shows at its begin, and at its end
# How a kernel names the file of a cell. The search begins at the start of a word only: begun at
# each letter of a word, it would take time that grows with the square of the word's length.
CELL_FILE = re.compile(r'(?<![^\s"])[^\s"]*ipykernel_\d+[/\\]\d+\.py')


def shown_name(file: str) -> str:
    """A notebook's cell by its number, "Cell In[3]"; any other file as it is.

    Only the notebook's own process knows its cells; elsewhere their file names mean nothing.
    """
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython else None
    cell = shell.compile.format_code_name(file) if shell is not None else None
    return " ".join(cell) if cell else file


def learner_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from `frame` outwards, that is neither dtlab's nor a library's; if there
    is none, the innermost of a library."""
    of_library = None
    while frame is not None and (file := frame.f_code.co_filename).startswith(LIBRARIES):
        if of_library is None and not file.startswith(PACKAGE):
            of_library = frame
        frame = frame.f_back
    return frame or of_library


def learner_line(frame: FrameType | None) -> str:
    """"ring.py:17 in step", "Cell In[3]:2 in step": the learner's line that led to `frame`.

    "" if there is none.
    """
    frame = learner_frame(frame)
    if frame is None:
        return ""
    code = frame.f_code
    name = shown_name(code.co_filename)
    return f"{Path(name).name}:{frame.f_lineno} in {code.co_name}"


Place = tuple[str, int, str]  # file, line number, function


def calling_place() -> Place:
    """Find where the learner's innermost code is, see `learner_frame`; quick, for `place_text`."""
    frame = learner_frame(sys._getframe(1))
    if frame is None:
        return "", 0, ""
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


def place_text(place: Place) -> str:
    """"ring.py:17 in step". A notebook's cell keeps its whole file name, which only the notebook's
    process can replace: see `with_cell_names`."""
    file, line, name = place
    return f"{file if CELL_FILE.fullmatch(file) else Path(file).name}:{line} in {name}"


def with_cell_names(text: str) -> str:
    """Return `text`, in which notebook cells are called by their numbers."""
    return CELL_FILE.sub(lambda file: shown_name(file[0]), text)


def calling_frame(skip: tuple[str, ...]) -> FrameType:
    """The innermost frame that lies in none of the files and folders `skip`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(skip):
        frame = frame.f_back
    return frame or sys._getframe(1)


def line_of(frame: FrameType) -> str:
    """"ring.py:17 in step", as `place_text`."""
    return place_text((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))


def variable_name(value: object, frame: FrameType) -> str:
    """Return the name of `value` in `frame`: "x", "self.weight"; "" if it has no name there."""
    for name, local in frame.f_locals.items():
        if local is value:
            return name
        named = None if isinstance(local, type) else getattr(local, "named_parameters", None)
        for inner, parameter in named() if callable(named) else ():  # a module's
            if parameter is value:
                return f"{name}.{inner}"
    return ""


def traceback_text(error: BaseException, skip: tuple[str, ...]) -> str:
    """The traceback of `error` from the learner's first line on; if there is none, without the
    leading frames that lie in the files `skip`.

    What dtlab raises on purpose ends at the line that called dtlab.
    """
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not all(file.startswith(PACKAGE) for file in files):
        skip = tuple(file for file in files if file.startswith(PACKAGE))
    step: TracebackType | None = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename in skip:
        step = step.tb_next
    story = traceback.TracebackException(type(error), error, step)
    if ends_at_caller(error):
        while len(story.stack) > 1 and story.stack[-1].filename.startswith(LIBRARIES):
            story.stack.pop()
    return with_cell_names("".join(without_middle([*story.format()])))


def without_middle(calls: list[str]) -> list[str]:
    """The lines of a traceback; of very many, which functions leave that call each other without
    end, the first and the last."""
    left_out = len(calls) - 2 * _MOST_CALLS
    return calls if left_out <= 0 else [
        *calls[:_MOST_CALLS], f"  [{left_out} more calls]\n", *calls[-_MOST_CALLS:]]


# ---- errors that leave dtlab end at the line that called it --------------------------------------

AnyError = TypeVar("AnyError", bound=BaseException)


def end_at_caller(error: AnyError) -> AnyError:
    """Return `error`, to be raised by what a learner has called: its traceback begins anew, and is
    shown without dtlab's own frames. For what isn't dtlab's own error, such as an interrupt."""
    error._render_traceback_ = partial(_in_ipython, error)  # type: ignore[attr-defined]
    return error.with_traceback(None)


def ends_at_caller(error: BaseException) -> bool:
    """Is `error` dtlab's own, or one of `end_at_caller`?"""
    return hasattr(error, "_render_traceback_")


def _until_caller(trace: TracebackType | None) -> TracebackType | None:
    """A copy of `trace` without its last frames that are dtlab's or another library's."""
    steps = []
    while trace is not None:
        steps.append(trace)
        trace = trace.tb_next
    while len(steps) > 1 and steps[-1].tb_frame.f_code.co_filename.startswith(LIBRARIES):
        steps.pop()
    copied = None
    for step in reversed(steps):
        copied = TracebackType(copied, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return copied


def _in_ipython(error: BaseException) -> list[str]:
    """Return what IPython shows, which asks an exception's `_render_traceback_` for it."""
    shell = sys.modules["IPython"].get_ipython()
    trace = _until_caller(error.__traceback__)
    lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, trace)
    return lines


def end_tracebacks_at_caller() -> None:
    """Have Python and IPython show dtlab's errors, from now on, up to the line that called it."""
    DtlabError._render_traceback_ = _in_ipython  # type: ignore[attr-defined]
    if sys.excepthook is not _in_python:
        global _python_shows
        _python_shows, sys.excepthook = sys.excepthook, _in_python


_python_shows = sys.__excepthook__


def _in_python(kind: type[BaseException], error: BaseException,
               trace: TracebackType | None) -> None:
    """`sys.excepthook`; with DTLAB_DEBUG=1 all frames are shown."""
    if ends_at_caller(error) and os.environ.get("DTLAB_DEBUG") != "1":
        error.__traceback__ = trace = _until_caller(trace)
    _python_shows(kind, error, trace)
