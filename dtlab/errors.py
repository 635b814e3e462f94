"""Every error that dtlab raises on purpose. All are `DtlabError`, so one `except` catches them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class DtlabError(Exception):
    """The root of the family. Its message is written for the person who caused it."""


class ConfigError(DtlabError, ValueError):
    """An argument makes no sense: ranks=-1, an unknown algorithm, a rank that does not exist."""


class ShapeMismatch(DtlabError, ValueError):
    """A message is not what its receiver made room for: another shape, dtype or collective."""


class SilentCorruption(DtlabError):
    """Copies that should be equal differ: bits have changed in the memory of `ranks`."""

    def __init__(self, message: str, ranks: Sequence[int] = ()):
        self.ranks = list(ranks)
        super().__init__(message)


class NotFinite(DtlabError):
    """A number became NaN or infinite; the message says on which rank, in which step and layer."""


class TypeMismatch(DtlabError):
    """Tensors meet whose SPMD types don't fit: a conversion is missing, or one too many."""


class UnwaitedWork(DtlabError):
    """A rank returned without having waited for what it had posted or begun."""

    @staticmethod
    def of(rank: int, work: Sequence[str], owed: Iterable[str] = ()) -> UnwaitedWork:
        """The error of `rank`; work: what each piece is and the line that began it; owed: calls
        for which they waited."""
        if missing := next(filter(None, owed), ""):
            return UnwaitedWork(f"rank {rank} returned without calling {missing}, for which others "
                                f"wait; it is to be the last call")
        more = f", and {len(work) - 1} more" if len(work) > 1 else ""
        return UnwaitedWork(f"rank {rank} returned without waiting for its {work[0]}{more}; "
                            f"wait for what isend, irecv, post and begin return, or cancel it")


class Waiting(NamedTuple):
    """One row of the table that `Deadlock` and `RunTimeout` print: what a rank was doing."""

    rank: int
    doing: str  # "send", "recv", "exchange", "compute", "returned", …
    peer: str = ""  # "0", "anyone", "0 and 2"
    nbytes: int | None = None
    line: str = ""  # "ring.py:17 in step"


def waiting_table(rows: Sequence[Waiting]) -> str:
    """The table as text, one line a rank, columns aligned.

    >>> print(waiting_table([Waiting(0, "send", "1", 4, "a.py:3 in f")]))
    rank  doing  with  bytes  at
       0  send   1         4  a.py:3 in f
    """
    head = ("rank", "doing", "with", "bytes", "at")
    cells = [head] + [
        (str(w.rank), w.doing, w.peer, "" if w.nbytes is None else f"{w.nbytes:,}", w.line)
        for w in rows
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = []
    for rank, doing, peer, nbytes, at in cells:
        lines.append(
            f"{rank:>{widths[0]}}  {doing:<{widths[1]}}  {peer:<{widths[2]}}  "
            f"{nbytes:>{widths[3]}}  {at}".rstrip()
        )
    return "\n".join(lines)


def why_stuck(rows: Sequence[Waiting], calls: Iterable[str]) -> str:
    """Say what the labels of the collectives in which ranks wait (`calls`; "" if in none) give
    away: some wait in another one than the rest, or for a rank that has crashed or left early.
    Return "" if nothing.
    """
    calls = [*dict.fromkeys(filter(None, calls))]
    names = [*dict.fromkeys(call.split("(")[0] for call in calls)]
    if len(calls) > 1:  # the same call with another root, say, is shown in full
        return (f": some are in {', others in '.join(names if len(names) > 1 else calls)}; "
                f"all ranks must make the same calls, in the same order")
    awaited = {peer for row in rows for peer in row.peer.split(" and ")}
    crashed = [str(row.rank) for row in rows if row.doing == "crashed"]
    if awaited & {*crashed, *(["anyone"] if crashed else [])}:
        return f": {' and '.join(crashed)} crashed, and others wait for that"
    gone = [str(row.rank) for row in rows if row.doing == "returned"
            and awaited & {str(row.rank), "anyone"}]  # others have had their part, and went
    if names and gone:
        return (f": {' and '.join(gone)} returned without calling {names[0]}; "
                f"every rank must call it")
    return ""


class RunTimeout(DtlabError, TimeoutError):
    """The run did not end within its limit. `waiting` says what each rank was doing then; more: the
    lines after that table."""

    def __init__(self, message: str, waiting: Sequence[Waiting] = (), more: str = ""):
        self.waiting = list(waiting)
        table = f"\n{waiting_table(self.waiting)}" if waiting else ""
        super().__init__(message + table + more)


class Deadlock(RunTimeout):
    """No rank can ever go on: each waits for a message that nobody will send.

    It is the time-out that could be foreseen, hence its parent.
    """


def headline_of(error: BaseException) -> str:
    """"ValueError: …", also of a learner's own class that fails to say more."""
    try:
        words = str(error)
    except Exception as failed:
        words = f"(its __str__ raised {type(failed).__name__})"
    return f"{type(error).__name__}: {words}".removesuffix(": ")


def after_error(error: BaseException | None) -> str:
    """For a rank that waits in a `finally` or `except` block: the error that it has raised."""
    return f", after {headline_of(error):.60}" if error is not None else ""


_ADVICE = {  # part of a message of Python or torch → what to do instead
    "EOFError: EOF when reading a line":
        "a rank has no keyboard: ask before, and pass the answer as an argument",
    "BdbQuit": "a rank has no keyboard for a debugger: print what you would look at",
    "Default process group has not been initialized":
        "simulated ranks have no torch.distributed: use comm and dtlab.collectives, or dtlab.run",
    **dict.fromkeys(("Error initializing torch.distributed", "default process group twice"),
                    "ranks are connected already: use comm and dtlab.collectives"),
}


class RankFailed(DtlabError):
    """A rank raised. `rank` is its number, `traceback_text` its own traceback.

    When the rank's exception was one of dtlab's own (say `ShapeMismatch`), the error raised
    here is of that class too, so `except ShapeMismatch` works around `run` as it does inside.
    """

    rank: int = -1
    traceback_text: str = ""

    @staticmethod
    def from_rank(rank: int, cause: BaseException | str, traceback_text: str) -> RankFailed:
        """Build the error for `rank`; `cause` is its exception, or its text if it can't travel."""
        family: type[RankFailed] = RankFailed
        if isinstance(cause, DtlabError) and not isinstance(cause, (RankFailed, RunTimeout)):
            family = type("RankFailed", (RankFailed, type(cause)), {"__module__": __name__})
        headline = cause if isinstance(cause, str) else headline_of(cause)
        for sign, advice in _ADVICE.items():
            headline += f"; {advice}" if sign in headline else ""
        error = family(f"rank {rank} raised {headline}\n\n{traceback_text.rstrip()}")
        error.rank, error.traceback_text = rank, traceback_text
        if isinstance(cause, BaseException):
            error.__cause__ = cause
        return error


class RankDied(DtlabError):
    """A rank's process ended without returning: killed by a signal, or it called exit."""

    def __init__(self, message: str, rank: int = -1, exitcode: int | None = None):
        self.rank, self.exitcode = rank, exitcode
        super().__init__(message)

    @staticmethod
    def after_shrink(rank: int) -> RankDied:
        """The error of a rank that uses a communicator after it has called `shrink` on it."""
        return RankDied(f"rank {rank}: this communicator has ended with shrink, and all that was "
                        f"made of it; use the one that it returned: comm = comm.shrink()")
