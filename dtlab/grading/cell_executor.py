"""The referee's side of executing a learner's cells: what ends the process is left out."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from dtlab.grading.case import Submission
from dtlab.grading.frames import ConnectionClosed, FrameTimeout
from dtlab.grading.rank_server import RankServer
from dtlab.grading.submitted import SubmittedCell
from dtlab.grading.untrusted_process import UntrustedProcess

CELL_LIMIT_S = 5.0  # a solution cell defines a function, which takes no time
CELLS_LIMIT_S = 20.0  # of all cells, also where they run again without one that ended the process


class Executed(NamedTuple):
    """The result of executing the cells of a notebook."""

    functions: dict[str, Submission]  # by name
    troubles: dict[str, str]  # grade id → what went wrong in its cell


def execute_cells(server: RankServer, cells: list[SubmittedCell], names: list[str],
                  until_s: float = math.inf) -> Executed:
    """Execute `cells` one after the other and take the functions called `names`. A cell that
    raises, hangs or ends the process is left out, and noted; the others count. until_s: when the
    time of the whole hand-in is over (monotonic)."""
    until_s = min(until_s, time.monotonic() + CELLS_LIMIT_S)
    troubles = {cell.answers: cell.error for cell in cells if cell.error}
    remaining = [number for number, cell in enumerate(cells) if cell.code]
    while True:
        wanted = [[n, _file(cells[n], n), cells[n].code] for n in remaining]
        process = UntrustedProcess(server, "cells", cells=wanted, names=names)
        end = _watch(process, until_s)
        how = process.how_it_ended() if end.ended_in is not None and not end.why else ""
        process.end()
        if end.ended_in is None:
            for number, text in end.troubles.items():
                if 0 <= number < len(cells):
                    troubles.setdefault(cells[number].answers, text)
            sources = {_file(cell, n): cell.code for n, cell in enumerate(cells)}
            return Executed({name: Submission(pickled, sources=sources)
                             for name, pickled in end.functions.items()}, troubles)
        why = end.why or f"the cell ended the process ({how or 'it closed its connection'})"
        over = time.monotonic() > until_s
        if over:
            why = f"the cells had not ended after {CELLS_LIMIT_S:g} s"
        if over or end.ended_in not in remaining:  # no cell to leave out
            return Executed({}, {cell.answers: why for cell in cells} | troubles)
        troubles.setdefault(cells[end.ended_in].answers, why)
        remaining.remove(end.ended_in)


class _End(NamedTuple):
    """The end of one execution of the cells."""

    ended_in: int | None = None  # this cell; None: all were executed
    why: str = ""
    functions: dict[str, bytes] = {}  # noqa: RUF012 (never changed)
    troubles: dict[int, str] = {}  # noqa: RUF012


def _watch(process: UntrustedProcess, until_s: float) -> _End:
    """Receive the frames of the process until it ends. They may hold anything."""
    current = -1
    while True:
        try:
            process.start_timing()
            limit_s = min(CELL_LIMIT_S, max(until_s - time.monotonic(), 0.0))
            kind, _, fields, blobs, _ = process.recv(limit_s)
            if kind == "done":
                troubles = {int(number): str(text) for number, text in fields["troubles"].items()}
                names = [str(name) for name in fields["names"]]
                return _End(None, "", dict(zip(names, map(bytes, blobs), strict=True)), troubles)
            if int(fields["cell"]) <= current:
                return _End(current)  # a hostile process could begin cells without end
            current = int(fields["cell"])
        except FrameTimeout:
            return _End(current, f"the cell had not ended after {CELL_LIMIT_S:g} s")
        except (ConnectionClosed, KeyError, ValueError, TypeError, AttributeError):
            return _End(current)


def _file(cell: SubmittedCell, number: int) -> str:
    """The name under which tracebacks know a cell."""
    return f"<cell {cell.answers or number}>"
