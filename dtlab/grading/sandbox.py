"""The trusted side of the sandbox: starts the ranks' processes, runs a case on them, ends them.

Each rank of a simulation is a `RequestHandler`, which does in the simulator what the rank's process
requests. Nothing that a learner's process says is believed beyond its own messages, its own result
and (for the memory check) its own meter.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import cloudpickle

from dtlab import topology
from dtlab.errors import Deadlock, DtlabError, Waiting, waiting_table
from dtlab.grading import exercises
from dtlab.grading.case import Case, CaseFailure, Outcome, Submission
from dtlab.grading.frames import ConnectionClosed, Frame, FrameTimeout
from dtlab.grading.rank_server import RankServer
from dtlab.grading.request_handler import (
    INVALID,
    Aborted,
    RankState,
    RequestHandler,
    note_end,
)
from dtlab.grading.untrusted_process import UntrustedProcess
from dtlab.processes.endpoint import Reply
from dtlab.processes.run import merge
from dtlab.simulator import simulate_shared
from dtlab.simulator.works import MessageWork

CASE_LIMIT_S = 2.5  # of real time; a right answer takes a few hundredths
GLOO_LIMIT_S = 10.0
REQUESTS_PER_RANK = 3_000  # of one call; a right answer makes a few dozen


class Sandbox:
    """Runs cases of one submission, on ranks that `server` forks."""

    def __init__(self, submission: Submission, server: RankServer):
        self._submission, self._server = submission, server
        self._processes: list[UntrustedProcess] = []

    def run_case(self, case: Case) -> Outcome:
        """Call the function on every rank of `case`. A failure ends the ranks' processes, so that
        the next case starts afresh."""
        if case.gloo:
            return self._run_on_gloo(case)
        while len(self._processes) < case.ranks:
            self._processes.append(UntrustedProcess(self._server, "rank", gloo=False))
        outcome = new_outcome(case)
        run = CaseRun(case, outcome, self._processes)
        send_calls(case, self._submission, self._processes)
        run.simulate()
        if outcome.failure:
            self.close()
        return outcome

    def _run_on_gloo(self, case: Case) -> Outcome:
        """Call the function on real processes, which meet over Gloo. They tell the referee only how
        the function ended, in frames."""
        outcome = new_outcome(case)
        ranks = [UntrustedProcess(self._server, "rank", gloo=True) for _ in range(case.ranks)]
        try:
            send_calls(case, self._submission, ranks, port=free_port())
            outcome.failure = _await_ends(ranks, outcome)
        finally:
            for process in ranks:
                process.end()
        return outcome

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.end()
        self._processes = []


def new_outcome(case: Case) -> Outcome:
    """To be filled in."""
    p = case.ranks
    return Outcome([None] * p, [()] * p, 0.0, peak_bytes=[0] * p, printed=[""] * p)


def send_calls(case: Case, submission: Submission, processes: Sequence[UntrustedProcess],
               port: int = 0) -> None:
    """Let every rank's process begin. port: where they meet over Gloo; 0: in the simulator."""
    harness = pickled_by_value(case.harness)
    for rank, args in enumerate(case.args):
        process = processes[rank]
        process.start_timing()
        # Errors show when the rank's next frame is awaited.
        with suppress(FrameTimeout, ConnectionClosed):
            process.socket.send(
                "call", submission.pickled, pickled_by_value(args), harness,
                until_s=time.monotonic() + CASE_LIMIT_S, path=submission.path,
                cwd=submission.cwd, sources=submission.sources, rank=rank, size=case.ranks,
                comm=case.comm, meter=case.meter, library=case.library, port=port)


def pickled_by_value(value: Any) -> bytes:
    """With what it uses of the exercises' modules, which the sandbox does not have."""
    cloudpickle.register_pickle_by_value(exercises)
    try:
        return bytes(cloudpickle.dumps(value))
    finally:
        cloudpickle.unregister_pickle_by_value(exercises)


def free_port() -> int:
    """A port on which nobody listens at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _await_ends(ranks: Sequence[UntrustedProcess], outcome: Outcome) -> CaseFailure | None:
    """Until the function has returned on all ranks; or why it has not."""
    waiting = set(range(len(ranks)))
    replies = [Reply(0.0, None, [], [], [])] * len(ranks)
    until_s = time.monotonic() + GLOO_LIMIT_S
    while waiting:
        for rank in sorted(waiting):
            if not ranks[rank].socket.wait(time.monotonic() + 0.01):
                continue
            try:
                ended = ranks[rank].recv(GLOO_LIMIT_S)
                if failure := note_end(outcome, rank, ended):
                    return failure
                replies[rank] = Reply(0.0, None, ended.fields["sent"], [], [])
            except (ConnectionClosed, FrameTimeout, *INVALID) as error:
                how = ranks[rank].how_it_ended() or f"it sent what is no result ({error})"
                return CaseFailure("died", rank, message=how)
            waiting.discard(rank)
        if time.monotonic() > until_s:
            rank = min(waiting)
            return CaseFailure("hung", rank, message=f"no end after {GLOO_LIMIT_S:g} s",
                               at=ranks[rank].place(0))
    try:
        outcome.trace = merge(replies)
    except INVALID as error:
        return CaseFailure("died", message=f"a rank sent what is no result ({error})")
    return None


class CaseRun:
    """One case, under way: what the request handlers of its ranks share."""

    def __init__(self, case: Case, outcome: Outcome, processes: list[UntrustedProcess]):
        self.case, self.outcome, self.processes = case, outcome, processes
        self.ranks = [RankState() for _ in range(case.ranks)]

    def simulate(self) -> None:
        """Run the case in the simulator, every rank on behalf of its process; fill the outcome."""
        case, outcome = self.case, self.outcome
        network = case.cluster or topology.uniform(case.ranks, case.latency_s, case.bandwidth_Bps)
        try:
            result = simulate_shared(lambda comm: RequestHandler(comm, comm.rank, self).run(),
                                     network)
        except DtlabError as error:
            outcome.failure = outcome.failure or self._unwaited(error) or self._failure(error)
        else:
            outcome.failure = self._unwaited() or self._mismatch()
            outcome.elapsed_s, outcome.trace = result.elapsed_s, result.trace

    def _unwaited(self, error: DtlabError | None = None) -> CaseFailure | None:
        """The first error of a begun function that no rank waited for; or, unless ranks can't go on
        (`error`), the first work that no rank waited for."""
        for state in self.ranks:
            for failure in state.raised.values():
                return failure
        for rank, state in enumerate(self.ranks):
            for pending in state.pending.values():
                if not isinstance(error, Deadlock):
                    return CaseFailure("pending", rank, message=pending.what, at=pending.begun_at)
        return None

    def _mismatch(self) -> CaseFailure | None:
        """A message whose ends differ in size fails the case, even if a rank has caught the error.
        """
        return next((state.mismatch for state in self.ranks if state.mismatch), None)

    def _failure(self, error: DtlabError) -> CaseFailure:
        """Why the simulation ended, though no rank's process has reported an error."""
        if not isinstance(error, Deadlock):
            return CaseFailure("raised", error=type(error).__name__, message=str(error))
        rows = [self._in_full(row) for row in error.waiting]
        headline = str(error).split("\n")[0].removeprefix("deadlock: ")
        return CaseFailure("deadlock", error="Deadlock", message=headline,
                           details=waiting_table(rows))

    def _in_full(self, row: Waiting) -> Waiting:
        """The row with the learner's line, and as an exchange if the rank has more under way than
        what it waits for first."""
        state = self.ranks[row.rank]
        peers = [work.what.split()[-1] for work in state.pending.values()
                 if isinstance(work.work, MessageWork) and not work.work.is_done()]
        if peers and row.doing in ("send", "recv"):
            peer = " and ".join(dict.fromkeys([row.peer, *peers]))
            row = row._replace(doing="exchange", peer=peer)
        return row._replace(line=state.places.get(_stream(row), ""))

    def fail(self, failure: CaseFailure) -> NoReturn:
        """End the case: the first failure is the one that counts."""
        if self.outcome.failure is None:
            self.outcome.failure = failure
        raise Aborted

    def next_request(self, rank: int, stream: int) -> Frame:
        """The next request of one of the rank's streams; fails the case if none comes, or if the
        rank makes too many."""
        if self.outcome.failure is not None:
            raise Aborted
        state = self.ranks[rank]
        state.requests += 1
        if state.requests > REQUESTS_PER_RANK:
            self.fail(CaseFailure("limit", rank, at=state.places.get(stream, ""),
                                  message=f"more than {REQUESTS_PER_RANK:,} operations"))
        process = self.processes[rank]
        try:
            request = process.recv(CASE_LIMIT_S, stream)
        except FrameTimeout:
            self.fail(CaseFailure("hung", rank, message=f"no end after {CASE_LIMIT_S} s",
                                  at=process.place(stream)))
        except ConnectionClosed as error:
            self.fail(CaseFailure("died", rank, message=process.how_it_ended() or str(error),
                                  at=state.places.get(stream, "")))
        state.places[stream] = str(request.fields.get("at", ""))
        return request

    def answer(self, rank: int, stream: int, fields: dict[str, Any],
               blobs: Sequence[bytes] = ()) -> None:
        """Answer a request."""
        with suppress(FrameTimeout, ConnectionClosed):  # shows when the next frame is awaited
            self.processes[rank].socket.send("answer", *blobs, stream=stream,
                                             until_s=time.monotonic() + CASE_LIMIT_S, **fields)


def _stream(row: Waiting) -> int:
    """Of which stream of its rank this row of a deadlock's table is."""
    found = re.search(r"\(stream (\d+)\)", row.doing)
    return int(found[1]) if found else 0
