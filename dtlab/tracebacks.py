"""Where in the learner's own code something happened."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import FrameType, TracebackType

PACKAGE = str(Path(__file__).parent)


def learner_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from `frame` outwards, that isn't inside the dtlab package."""
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return frame


def learner_line(frame: FrameType | None) -> str:
    """"ring.py:17 in step": the learner's line that led to `frame`; "" if there is none."""
    frame = learner_frame(frame)
    if frame is None:
        return ""
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"


def traceback_text(error: BaseException, skip: tuple[str, ...]) -> str:
    """The traceback of `error`, without the leading frames that lie in the files `skip`."""
    step: TracebackType | None = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename in skip and step.tb_next:
        step = step.tb_next
    return "".join(traceback.format_exception(type(error), error, step))
