"""The trusted side of the sandbox: starts the ranks' processes, runs a case on them, ends them.

Each rank of a simulation is a `RequestHandler`, which does in the simulator what the rank's process
requests. Nothing that a learner's process says is believed beyond its own messages, its own result
and (for the memory check) its own meter.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from dtlab import topology
from dtlab.errors import Deadlock, DtlabError, waiting_table
from dtlab.grading import sandboxed_rank
from dtlab.grading.case import Case, CaseFailure, Outcome, Submission
from dtlab.grading.frames import ConnectionClosed, Frame, FrameTimeout
from dtlab.grading.request_handler import Aborted, RequestHandler
from dtlab.grading.untrusted_process import UntrustedProcess
from dtlab.simulator import simulate

CASE_LIMIT_S = 2.5  # of real time; a right answer takes a few hundredths
REQUESTS_PER_RANK = 3_000  # of one call; a right answer makes a few dozen


class Sandbox:
    """Runs cases of one submission."""

    def __init__(self, submission: Submission):
        self._submission = submission
        self._processes: list[UntrustedProcess] = []

    def run_case(self, case: Case) -> Outcome:
        """Call the function on every rank of `case`. A failure ends the ranks' processes, so that
        the next case starts afresh."""
        while len(self._processes) < case.ranks:
            self._processes.append(UntrustedProcess(sandboxed_rank.serve))
        outcome = Outcome([None] * case.ranks, [()] * case.ranks, 0.0,
                          peak_bytes=[0] * case.ranks, printed=[""] * case.ranks)
        run = CaseRun(case, outcome, self._processes)
        run.send_calls(self._submission)
        run.simulate()
        if outcome.failure:
            self.close()
        return outcome

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.end()
        self._processes = []


class CaseRun:
    """One case, under way: what the request handlers of its ranks share."""

    def __init__(self, case: Case, outcome: Outcome, processes: list[UntrustedProcess]):
        self.case, self.outcome, self.processes = case, outcome, processes
        self.places: dict[tuple[int, int], str] = {}  # (rank, stream) → its line when it last asked
        # (rank, stream) → what a begun function has raised, until the rank waits for it
        self.raised: dict[tuple[int, int], CaseFailure] = {}
        self._requests = [0] * case.ranks

    def send_calls(self, submission: Submission) -> None:
        """Let every rank's process begin."""
        case = self.case
        for rank, args in enumerate(case.args):
            process = self.processes[rank]
            process.start_timing()
            # Errors show when the rank's next frame is awaited.
            with suppress(FrameTimeout, ConnectionClosed):
                process.socket.send(
                    "call", submission.pickled, pickle.dumps(args), pickle.dumps(case.harness),
                    until_s=time.monotonic() + CASE_LIMIT_S, path=submission.path,
                    cwd=submission.cwd, sources=submission.sources, rank=rank, size=case.ranks,
                    comm=case.comm, meter=case.meter)

    def simulate(self) -> None:
        """Run the case in the simulator, every rank on behalf of its process; fill the outcome."""
        case, outcome = self.case, self.outcome
        network = case.cluster or topology.uniform(case.ranks, case.latency_s, case.bandwidth_Bps)
        try:
            result = simulate(lambda comm: RequestHandler(comm, comm.rank, self).run(),
                              network=network, echo=False)
        except DtlabError as error:
            outcome.failure = outcome.failure or self._failure(error)
        else:
            outcome.elapsed_s, outcome.trace = result.elapsed_s, result.trace

    def _failure(self, error: DtlabError) -> CaseFailure:
        """Why the simulation ended, though no rank's process reported an error of its own."""
        if self.raised:  # by a function that nobody has waited for: the others wait for it
            return next(iter(self.raised.values()))
        if isinstance(error, Deadlock):
            rows = [row._replace(line=self.places.get((row.rank, 0), "")) for row in error.waiting]
            return CaseFailure("deadlock", error="Deadlock", details=waiting_table(rows),
                               message="every rank that is left waits for another")
        return CaseFailure("raised", error=type(error).__name__, message=str(error))

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
        self._requests[rank] += 1
        if self._requests[rank] > REQUESTS_PER_RANK:
            self.fail(CaseFailure("chatter", rank, at=self.places.get((rank, stream), ""),
                                  message=f"more than {REQUESTS_PER_RANK:,} operations"))
        process = self.processes[rank]
        try:
            request = process.recv(CASE_LIMIT_S, stream)
        except FrameTimeout:
            self.fail(CaseFailure("hung", rank, message=f"no end after {CASE_LIMIT_S} s",
                                  at=process.place(stream)))
        except ConnectionClosed as error:
            self.fail(CaseFailure("died", rank, message=process.how_it_ended() or str(error),
                                  at=self.places.get((rank, stream), "")))
        self.places[rank, stream] = str(request.fields.get("at", ""))
        return request

    def answer(self, rank: int, stream: int, fields: dict[str, Any],
               blobs: Sequence[bytes] = ()) -> None:
        """Answer a request."""
        with suppress(FrameTimeout, ConnectionClosed):  # shows when the next frame is awaited
            self.processes[rank].socket.send("answer", *blobs, stream=stream,
                                             until_s=time.monotonic() + CASE_LIMIT_S, **fields)
