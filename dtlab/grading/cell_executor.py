"""Executes a learner's cells, in the sandbox, to get the functions that they define."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, NamedTuple

import cloudpickle

from dtlab.errors import DtlabError
from dtlab.grading.case import Submission
from dtlab.grading.frames import ConnectionClosed, FrameSocket, FrameTimeout
from dtlab.grading.judge import prepare_to_fork
from dtlab.grading.learner_errors import describe_error
from dtlab.grading.sandboxed_rank import Printed, discard_output
from dtlab.grading.submitted import SubmittedCell
from dtlab.grading.untrusted_process import STARVED_FACTOR, UntrustedProcess
from dtlab.processes import run

CELL_LIMIT_S = 5.0  # a solution cell defines a function, which takes no time


class Executed(NamedTuple):
    """What executing the cells of a notebook gave."""

    functions: dict[str, Submission]  # by name
    troubles: dict[str, str]  # grade id → what went wrong in its cell


def execute_cells(cells: list[SubmittedCell], names: list[str]) -> Executed:
    """Execute `cells` one after the other and take the functions called `names`.

    A cell that raises, hangs or ends the process is left out, and noted; the others count.
    """
    limit_s = STARVED_FACTOR * CELL_LIMIT_S * (len(cells) + 2)
    try:
        executed: Executed = run(_supervise, cells, names, ranks=1, timeout=limit_s, trace=False,
                         echo=False).values[0]
    except DtlabError as error:  # a cell left its sandbox
        headline = str(error).splitlines()[0]
        why = f"the notebook's cells ended the process that graded them ({headline})"
        return Executed({}, {cell.answers: cell.error or why for cell in cells})
    return executed


def _supervise(_comm: Any, cells: list[SubmittedCell], names: list[str]) -> Executed:
    """In a trusted process: let another one execute the cells; start over without one that ends it.
    """
    prepare_to_fork()
    troubles = {cell.answers: cell.error for cell in cells if cell.error}
    left = [number for number, cell in enumerate(cells) if cell.code]
    while True:
        process = UntrustedProcess(lambda sock: _execute(sock, cells, left, names))
        end = _watch(process)
        if end.ended_in is None:
            process.end()
            for number, text in end.troubles.items():
                troubles.setdefault(cells[number].answers, text)
            sources = {_file(cell, n): cell.code for n, cell in enumerate(cells)}
            where = list(sys.path), os.getcwd(), sources
            return Executed({n: Submission(b, *where) for n, b in end.functions.items()}, troubles)
        how = process.how_it_ended() or "it closed its connection"
        why = end.why or f"the cell ended the process ({how})"
        process.end()
        if end.ended_in not in left:  # in no cell that could be left out
            return Executed({}, troubles)
        troubles.setdefault(cells[end.ended_in].answers, why)
        left.remove(end.ended_in)


class _End(NamedTuple):
    """How an execution of the cells ended."""

    ended_in: int | None = None  # this cell; None: all were executed
    why: str = ""
    functions: dict[str, bytes] = {}  # noqa: RUF012 (never changed)
    troubles: dict[int, str] = {}  # noqa: RUF012


def _watch(process: UntrustedProcess) -> _End:
    """Receive the frames of the process until it ends. They may hold anything."""
    current = 0
    while True:
        try:
            process.start_timing()
            kind, _, said, blobs = process.recv(CELL_LIMIT_S)
            if kind == "done":
                troubles = {int(number): str(text) for number, text in said["troubles"].items()}
                names = [str(name) for name in said["names"]]
                return _End(None, "", dict(zip(names, blobs, strict=True)), troubles)
            current = int(said["cell"])
        except FrameTimeout:
            return _End(current, f"the cell had not ended after {CELL_LIMIT_S:g} s")
        except (ConnectionClosed, KeyError, ValueError, TypeError, AttributeError):
            return _End(current)


def _file(cell: SubmittedCell, number: int) -> str:
    """The name under which tracebacks know a cell."""
    return f"<cell {cell.answers or number}>"


# ---- in the untrusted process ------------------------------------------------------------------


def _execute(sock: FrameSocket, cells: list[SubmittedCell], left: list[int],
             names: list[str]) -> None:
    discard_output()
    sys.stdout = sys.stderr = Printed()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    troubles: dict[int, str] = {}
    for number in left:
        sock.send("begin", cell=number)
        try:
            exec(compile(cells[number].code, _file(cells[number], number), "exec"), namespace)
        except BaseException as error:  # the other cells count
            raised = describe_error(error)
            text = f"the cell raised {raised['error']}: {raised['message']}"
            troubles[number] = text.rstrip(": ")
    found, blobs = [], []
    for name in names:
        with suppress(Exception):  # what does not pickle counts as missing
            if callable(namespace.get(name)):
                blobs.append(cloudpickle.dumps(namespace[name]))
                found.append(name)
    sock.send("done", *blobs, troubles=troubles, names=found)
