"""Where in the learner's own code something happened."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path
from types import FrameType, TracebackType

from dtlab.errors import DtlabError

PACKAGE = str(Path(__file__).parent)
_CELL = re.compile(r'[^\s"]*ipykernel_\d+[/\\]\d+\.py')  # how a kernel names the file of a cell


def shown_name(file: str) -> str:
    """A notebook's cell by its number, "Cell In[3]"; any other file as it is.

    Only the notebook's own process knows its cells; elsewhere their file names mean nothing.
    """
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython else None
    cell = shell.compile.format_code_name(file) if shell is not None else None
    return " ".join(cell) if cell else file


def learner_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from `frame` outwards, that isn't inside the dtlab package."""
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return frame


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
    """Where the innermost code that isn't dtlab's own is now: quick, for `place_text`."""
    frame = learner_frame(sys._getframe(1))
    if frame is None:
        return "", 0, ""
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


def place_text(place: Place) -> str:
    """"ring.py:17 in step". A notebook's cell keeps its whole file name, which only the notebook's
    process can replace: see `with_cell_names`."""
    file, line, name = place
    return f"{file if _CELL.fullmatch(file) else Path(file).name}:{line} in {name}"


def with_cell_names(text: str) -> str:
    """`text`, in which notebook cells are called by their numbers."""
    return _CELL.sub(lambda file: shown_name(file[0]), text)


def traceback_text(error: BaseException, skip: tuple[str, ...]) -> str:
    """The traceback of `error`, without the leading frames that lie in the files `skip`.

    What dtlab raises on purpose ends at the line that called dtlab.
    """
    step: TracebackType | None = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename in skip:
        step = step.tb_next
    story = traceback.TracebackException(type(error), error, step)
    if isinstance(error, DtlabError):
        while len(story.stack) > 1 and story.stack[-1].filename.startswith(PACKAGE):
            story.stack.pop()
    return with_cell_names("".join(story.format()))
