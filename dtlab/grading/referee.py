"""The state of one case while it runs: its ranks' requests, and why it failed."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from dtlab.comm import Comm, Work
from dtlab.errors import Deadlock, DtlabError, Waiting, waiting_table
from dtlab.grading.case import Case, CaseFailure, Outcome
from dtlab.grading.frames import Blob, ConnectionClosed, Frame, FrameTimeout, decode
from dtlab.grading.untrusted_process import UntrustedProcess
from dtlab.simulator.works import MessageWork

CASE_LIMIT_S = 2.5  # of real time; a right answer takes a few hundredths
MOST_BYTES = 1 << 28  # of all requests of a case: this process holds messages under way
# In one case. A right answer makes a few dozen, and with an oracle up to thousands.
REQUESTS_PER_RANK = 10_000
# The errors of handling a frame that only a hostile process would send.
INVALID = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError,
           StopIteration, MemoryError)


class Aborted(Exception):
    """The case has failed; `outcome.failure` says why."""


class Pending(NamedTuple):
    """An operation that the process has neither waited for nor cancelled."""

    work: Work
    into: Any  # what it receives into; None if it receives nothing
    what: str  # "the send to rank 1"
    begun_at: str  # the learner's line


class RankState:
    """The state that the streams of one rank share."""

    def __init__(self, oracle: Any) -> None:
        self.oracle = oracle
        self.groups: list[Comm] = []  # 0: the whole run
        self.pending: dict[int, Pending] = {}  # by the numbers that the process gives
        # The errors of begun functions, by the same numbers, until the rank waits for them.
        self.raised: dict[int, CaseFailure] = {}
        self.places: dict[int, str] = {}  # stream → the learner's line of its last request
        self.requests = self.agreements = 0


class Referee:
    """State that the request handlers of a case's ranks share."""

    def __init__(self, case: Case, outcome: Outcome, processes: list[UntrustedProcess]):
        self.case, self.outcome, self.processes = case, outcome, processes
        self.nbytes = 0  # of all requests
        # A message whose ends differ in size fails the case, even if a rank has caught the error.
        self.mismatch: CaseFailure | None = None
        self.ranks = [RankState(case.oracle and case.oracle(rank)) for rank in range(case.ranks)]
        outcome.notes = [getattr(state.oracle, "notes", None) for state in self.ranks]

    def pending_failure(self, error: DtlabError | None = None) -> CaseFailure | None:
        """Return the first error of a begun function for which no rank waited; else, unless `error`
        is a deadlock, the first operation for which no rank waited."""
        for state in self.ranks:
            for failure in state.raised.values():
                return failure
        for rank, state in enumerate(self.ranks):
            for pending in state.pending.values():
                if not isinstance(error, Deadlock):
                    return CaseFailure("pending", rank, message=pending.what, at=pending.begun_at)
        return None

    def simulator_failure(self, error: DtlabError) -> CaseFailure:
        """Return the failure if the simulator raised `error`, and no rank's process reported one.
        """
        if not isinstance(error, Deadlock):
            return CaseFailure("raised", error=type(error).__name__, message=str(error))
        return deadlock_failure(error, [self._with_place(row) for row in error.waiting])

    def _with_place(self, row: Waiting) -> Waiting:
        """Return the row with the learner's line. It becomes an exchange if the rank has other
        messages under way than the one for which it waits."""
        state = self.ranks[row.rank]
        peers = [work.what.split()[-1] for work in state.pending.values()
                 if isinstance(work.work, MessageWork) and not work.work.is_done()]
        if peers and row.doing in ("send", "recv"):
            peer = " and ".join(dict.fromkeys([row.peer, *peers]))
            row = row._replace(doing="exchange", peer=peer)
        stream = re.search(r"\(stream (\d+)\)", row.doing)
        return row._replace(line=state.places.get(int(stream[1]) if stream else 0, ""))

    def fail(self, failure: CaseFailure) -> NoReturn:
        """End the case: the first failure is the one that counts."""
        self.outcome.failure = self.outcome.failure or failure
        raise Aborted

    def next_request(self, rank: int, stream: int) -> Frame:
        """Wait for the next request of one of the rank's streams. Fails the case if none comes in
        time, or if the rank makes too many."""
        if self.outcome.failure is not None:
            raise Aborted
        self.count(rank, stream, 1)
        state, process = self.ranks[rank], self.processes[rank]
        try:
            request = process.recv(CASE_LIMIT_S, stream)
        except FrameTimeout:
            self.fail(CaseFailure("hung", rank, message=f"no end after {CASE_LIMIT_S} s",
                                  at=process.place(stream)))
        except ConnectionClosed as error:
            self.fail(CaseFailure("died", rank, message=process.how_it_ended() or str(error),
                                  at=state.places.get(stream, "")))
        state.places[stream] = str(request.fields.get("at", ""))
        self.nbytes += request.nbytes
        if self.nbytes > MOST_BYTES:
            self.fail(CaseFailure("limit", rank, at=state.places[stream],
                                  message=f"more than {MOST_BYTES:,} bytes"))
        return request

    def count(self, rank: int, stream: int, operations: int) -> None:
        """Count `operations` requests of the rank; fail the case if it has made too many in all."""
        state = self.ranks[rank]
        state.requests += operations
        if state.requests > REQUESTS_PER_RANK:
            self.fail(CaseFailure("limit", rank, at=state.places.get(stream, ""),
                                  message=f"more than {REQUESTS_PER_RANK:,} operations"))

    def answer(self, rank: int, stream: int, fields: dict[str, Any],
               blobs: Sequence[Blob] = ()) -> None:
        """Answer a request."""
        # An error here shows again when the next frame is awaited.
        with suppress(FrameTimeout, ConnectionClosed):
            self.processes[rank].socket.send("answer", *blobs, stream=stream,
                                             until_s=time.monotonic() + CASE_LIMIT_S, **fields)


def deadlock_failure(error: Deadlock, rows: Sequence[Waiting]) -> CaseFailure:
    """The failure of ranks that wait for each other."""
    headline = str(error).split("\n")[0].removeprefix("deadlock: ")
    return CaseFailure("deadlock", error="Deadlock", message=headline, details=waiting_table(rows))


_LONGEST = {"error": 100, "message": 2_000, "at": 200, "traceback": 10_000, "printed": 4_000}


def _clipped(request: Frame, name: str) -> str:
    """Return a field of a rank's request, clipped to the length that a report shows."""
    return str(request.fields[name])[: _LONGEST[name]]


def record_end(outcome: Outcome, rank: int, request: Frame) -> CaseFailure | None:
    """Record the end of the learner's function; return the failure if it raised."""
    fields = request.fields
    outcome.printed[rank] = _clipped(request, "printed")
    if request.kind == "raise":
        return error_failure(rank, request)
    outcome.values[rank] = decode(fields["value"], request.blobs)
    outcome.args_after[rank] = decode(fields["after"], request.blobs)
    outcome.peak_bytes[rank] = int(fields["peak"])
    return None


def error_failure(rank: int, request: Frame) -> CaseFailure:
    """Return the failure that a rank reports."""
    names = "error", "message", "at", "traceback"
    return CaseFailure("raised", rank, *(_clipped(request, name) for name in names))
