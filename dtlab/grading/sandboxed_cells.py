"""Executes a learner's cells in the sandbox, to get the functions that they define."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import cloudpickle

from dtlab.grading.frames import Frame, FrameSocket
from dtlab.grading.learner_errors import describe_error
from dtlab.grading.sandboxed_rank import Printed


def serve(sock: FrameSocket, request: Frame) -> None:
    """Execute the cells of `request` and send the functions of the names that it wants.

    fields: cells, a list of [number, file, code]; names, those of the wanted functions.
    """
    sys.stdout = sys.stderr = Printed()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    troubles: dict[int, str] = {}
    for number, file, code in request.fields["cells"]:
        sock.send("begin", cell=number)
        try:
            exec(compile(code, file, "exec"), namespace)
        except BaseException as error:  # the other cells count
            raised = describe_error(error)
            text = f"the cell raised {raised['error']}: {raised['message']}"
            troubles[number] = text.rstrip(": ")
    found, blobs = [], []
    for name in request.fields["names"]:
        with suppress(Exception):  # what does not pickle counts as missing
            if callable(namespace.get(name)):
                blobs.append(cloudpickle.dumps(namespace[name]))
                found.append(name)
    sock.send("done", *blobs, troubles=troubles, names=found)
