"""The learner's line that led to where a strand is."""

from __future__ import annotations

import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from dtlab.tracebacks import learner_frame, shown_name


class SourceLine(NamedTuple):
    """A line of the learner's. It is put into words only if it is shown."""

    code: CodeType
    number: int

    def __str__(self) -> str:
        file = Path(shown_name(self.code.co_filename)).name
        return f"{file}:{self.number} in {self.code.co_name}"


def learner_line(frame: FrameType | None) -> SourceLine | None:
    """The innermost line, from `frame` outwards, that is neither dtlab's nor a thread's start."""
    frame = learner_frame(frame)
    if frame is None or frame.f_code.co_filename == threading.__file__:
        return None
    return SourceLine(frame.f_code, frame.f_lineno)
