"""How a line of the learner's code is called in messages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType


def place(frame: FrameType | None) -> str:
    """The line that `frame` is at, with its file's full name: see `shown_place`."""
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def shown_place(text: str) -> str:
    """"ring.py:17 in step" or "Cell In[3]:2 in step", from what `place` gave in a rank."""
    file, colon, rest = text.rpartition(":")
    name = shown_name(file)
    return f"{Path(file).name if name == file else name}{colon}{rest}"


def shown_name(file: str) -> str:
    """A notebook's cell by its number, any other file as it is.

    Only the notebook's own process knows its cells; in a rank they have meaningless file names.
    """
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython else None
    cell = shell.compile.format_code_name(file) if shell is not None else None
    return " ".join(cell) if cell else file
