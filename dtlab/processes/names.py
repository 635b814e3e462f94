"""How a line of the learner's code is called in messages."""

from __future__ import annotations

from pathlib import Path
from types import FrameType

from dtlab.tracebacks import shown_name


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
