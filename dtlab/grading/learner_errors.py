"""The errors of a learner's code, and the lines that made them, as text."""

from __future__ import annotations

import re
import threading
import traceback
from types import FrameType

from dtlab.tracebacks import CELL_FILE, PACKAGE, learner_frame, learner_line


def learner_place(frame: FrameType | None) -> str:
    """The learner's line that led to `frame`: "ring.py:17 in step", "line 3 in step" of a cell.
    "" if there is none."""
    frame = learner_frame(frame)
    if frame is None or frame.f_code.co_filename == threading.__file__:
        return ""  # a stream that runs a function of this package
    if frame.f_back is None and frame.f_code.co_filename == "<string>":
        return ""  # where the process began: the call itself failed
    return re.sub(r"^(?:\d+\.py|<cell .*>):(\d+)", r"line \1", learner_line(frame))


def describe_error(error: BaseException) -> dict[str, str]:
    """The learner's exception, as text: class, message, and the traceback of learner's lines."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    summary = traceback.TracebackException.from_exception(error)
    summary.stack = traceback.StackSummary.from_list(
        [line for line in summary.stack if not line.filename.startswith(PACKAGE)]
    )
    return {
        "error": type(error).__name__,
        "message": _text(error),
        "at": learner_place(frames[-1] if frames else None),
        "traceback": CELL_FILE.sub("your cell", "".join(summary.format()))[-4000:],
    }


def _text(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except Exception:  # a __str__ that raises
        return ""
