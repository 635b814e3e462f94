"""Executing a learner's cells, in the sandbox, to get at the functions that they define."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, NamedTuple

import cloudpickle

from dtlab.errors import DtlabError
from dtlab.grading.case import Submission
from dtlab.grading.court import settle_down
from dtlab.grading.inmate import Printed, describe_error, silence_files
from dtlab.grading.sandbox import PATIENCE, Inmate
from dtlab.grading.submitted import Piece
from dtlab.grading.wire import Hangup, Link, Silence
from dtlab.processes import run

CELL_LIMIT_S = 5.0  # a solution cell defines a function, which takes no time


class Made(NamedTuple):
    """What the cells of a notebook gave."""

    functions: dict[str, Submission]  # by name
    troubles: dict[str, str]  # grade id → what went wrong in its cell


def open_workshop(pieces: list[Piece], names: list[str]) -> Made:
    """Execute `pieces` one after the other and take the functions called `names`.

    A piece that raises, hangs or ends the process is left out, and noted; the others count.
    """
    limit_s = PATIENCE * CELL_LIMIT_S * (len(pieces) + 2)
    try:
        made: Made = run(_supervise, pieces, names, ranks=1, timeout=limit_s, trace=False,
                         echo=False).values[0]
    except DtlabError as error:  # a cell reached out of its sandbox
        why = f"the notebook's cells ended what graded them ({str(error).splitlines()[0]})"
        return Made({}, {piece.answers: piece.error or why for piece in pieces})
    return made


def _supervise(_comm: Any, pieces: list[Piece], names: list[str]) -> Made:
    """In a trusted process: let another one execute the pieces; start over without a bad one."""
    settle_down()
    troubles = {piece.answers: piece.error for piece in pieces if piece.error}
    left = [number for number, piece in enumerate(pieces) if piece.code]
    while True:
        inmate = Inmate(lambda link: _execute(link, pieces, left, names))
        end = _watch(inmate)
        if end.broke_off is None:
            inmate.end()
            for number, text in end.troubles.items():
                troubles.setdefault(pieces[number].answers, text)
            sources = {_file(piece, n): piece.code for n, piece in enumerate(pieces)}
            place = list(sys.path), os.getcwd(), sources
            return Made({n: Submission(b, *place) for n, b in end.functions.items()}, troubles)
        why = end.why or f"the cell ended the process ({inmate.how_it_ended() or 'it hung up'})"
        inmate.end()
        if end.broke_off not in left:  # nothing left that could be left out
            return Made({}, troubles)
        troubles.setdefault(pieces[end.broke_off].answers, why)
        left.remove(end.broke_off)


class _End(NamedTuple):
    """How an execution of the pieces ended."""

    broke_off: int | None = None  # at this piece; None: it came to the end
    why: str = ""
    functions: dict[str, bytes] = {}  # noqa: RUF012 (never changed)
    troubles: dict[int, str] = {}  # noqa: RUF012


def _watch(inmate: Inmate) -> _End:
    """Listen to the process to its end. What it says may be anything."""
    current = 0
    while True:
        try:
            inmate.begin()
            said, blobs = inmate.listen(CELL_LIMIT_S)
            if said["do"] == "done":
                troubles = {int(number): str(text) for number, text in said["troubles"].items()}
                names = [str(name) for name in said["names"]]
                return _End(None, "", dict(zip(names, blobs, strict=True)), troubles)
            current = int(said["piece"])
        except Silence:
            return _End(current, f"the cell had not ended after {CELL_LIMIT_S:g} s")
        except (Hangup, KeyError, ValueError, TypeError, AttributeError):
            return _End(current)


def _file(piece: Piece, number: int) -> str:
    """The name under which tracebacks know a piece."""
    return f"<cell {piece.answers or number}>"


# ---- in the untrusted process ------------------------------------------------------------------


def _execute(link: Link, pieces: list[Piece], left: list[int], names: list[str]) -> None:
    silence_files()
    sys.stdout = sys.stderr = Printed()
    space: dict[str, Any] = {"__name__": "__main__"}
    troubles: dict[int, str] = {}
    for number in left:
        link.send({"do": "begin", "piece": number})
        try:
            exec(compile(pieces[number].code, _file(pieces[number], number), "exec"), space)
        except BaseException as error:  # whatever a cell raises, the others count
            told = describe_error(error)
            troubles[number] = f"the cell raised {told['error']}: {told['message']}".rstrip(": ")
    found, blobs = [], []
    for name in names:
        with suppress(Exception):  # what does not pickle is as good as missing
            if callable(space.get(name)):
                blobs.append(cloudpickle.dumps(space[name]))
                found.append(name)
    link.send({"do": "done", "troubles": troubles, "names": found}, *blobs)
