"""The trusted side of the sandbox: starts the ranks' processes, runs a case on them, ends them.

Each rank of the simulation is a `RequestHandler`, which carries out the requests of the rank's
process. The referee takes from a learner's process only its messages, its result, and what its
memory meter reads, which real processes check.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import cloudpickle

from dtlab.errors import DtlabError
from dtlab.grading import exercises
from dtlab.grading.case import Case, CaseFailure, Outcome, Submission
from dtlab.grading.frames import ConnectionClosed, FrameTimeout
from dtlab.grading.rank_server import RankServer
from dtlab.grading.referee import CASE_LIMIT_S, INVALID, Referee, record_end
from dtlab.grading.request_handler import RequestHandler
from dtlab.grading.untrusted_process import UntrustedProcess
from dtlab.processes.endpoint import Reply
from dtlab.processes.run import merge
from dtlab.ranks.pickling import Pickled, Pickler
from dtlab.simulator import simulate_shared

GLOO_LIMIT_S = 10.0


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
        send_calls(case, self._submission, self._processes)
        _simulate(Referee(case, outcome, self._processes))
        if outcome.failure:
            self.close()
        return outcome

    def _run_on_gloo(self, case: Case) -> Outcome:
        """Call the function on real processes, whose messages go over Gloo. The referee gets a
        frame with the result of each."""
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
    """Return an outcome of `case`, to be filled in."""
    p = case.ranks
    return Outcome([None] * p, [()] * p, 0.0, peak_bytes=[0] * p, printed=[""] * p, asked=[0] * p,
                   grown_bytes=[0] * p)


def send_calls(case: Case, submission: Submission, processes: Sequence[UntrustedProcess],
               port: int = 0) -> None:
    """Send the call to every rank's process. port: where they meet over Gloo; 0: in the simulator,
    and the oracle stays here."""
    harness = pickled_by_value(case.harness, exercises).data  # its module is not in the sandbox
    oracle = pickled_by_value(case.oracle if port else None, exercises).data
    for rank, args in enumerate(case.args):
        process = processes[rank]
        process.start_timing()
        given = pickled_by_value(args, exercises, lends=True)
        # Errors show when the rank's next frame is awaited.
        with suppress(FrameTimeout, ConnectionClosed):
            process.socket.send(
                "call", submission.pickled, harness, oracle, given.data, *given.buffers,
                until_s=time.monotonic() + CASE_LIMIT_S, path=submission.path,
                cwd=submission.cwd, sources=submission.sources, rank=rank, size=case.ranks,
                comm=case.comm, asks=case.oracle is not None, meter=case.meter,
                library=case.library, port=port)


def pickled_by_value(value: Any, module: ModuleType | None, lends: bool = False) -> Pickled:
    """Pickle `value` together with what it uses of `module`, which its receiver can't import.
    lends: large tensors stay outside of the pickle, so that unpickling does not copy them."""
    if module is None:
        return Pickler(lends).pickled(value)
    cloudpickle.register_pickle_by_value(module)
    try:
        return Pickler(lends).pickled(value)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def free_port() -> int:
    """Return a port on which no process listens at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _simulate(referee: Referee) -> None:
    """Run the case in the simulator, with a request handler for every rank; fill the outcome."""
    case, outcome = referee.case, referee.outcome
    try:
        result = simulate_shared(lambda comm: RequestHandler(comm, comm.rank, referee).run(),
                                 case.network)
    except DtlabError as error:
        outcome.failure = (outcome.failure or referee.pending_failure(error)
                           or referee.simulator_failure(error))
    else:
        outcome.failure = referee.pending_failure() or referee.mismatch
        outcome.elapsed_s, outcome.trace = result.elapsed_s, result.trace


# The types in a row of `processes.recorder`, to which an untrusted process's rows are converted.
_ROW_TYPES = (bool, int, int, int, float, float, str, int)


def _await_ends(ranks: Sequence[UntrustedProcess], outcome: Outcome) -> CaseFailure | None:
    """Wait until the function has returned on all ranks; return the failure if it has not."""
    waiting = set(range(len(ranks)))
    replies = [Reply(0.0, None, [], [], [])] * len(ranks)
    before, grown = [0] * len(ranks), outcome.grown_bytes
    until_s = time.monotonic() + GLOO_LIMIT_S
    while waiting:
        for rank in sorted(waiting):
            if not ranks[rank].socket.wait(time.monotonic() + 0.01):
                if before[rank]:  # file pages are subtracted: ones touched later could hide a peak
                    grown[rank] = max(grown[rank], ranks[rank].held_bytes(False) - before[rank])
                continue
            try:
                ended = ranks[rank].recv(GLOO_LIMIT_S)
                peak = ranks[rank].held_bytes()
                if ended.kind == "ready":
                    before[rank] = peak
                    ranks[rank].socket.send("answer", until_s=until_s)
                    continue
                grown[rank] = max(grown[rank], peak - before[rank])
                if failure := record_end(outcome, rank, ended):
                    return failure
                sent = [tuple(kind(part) for kind, part in zip(_ROW_TYPES, row, strict=True))
                        for row in ended.fields["sent"]]
                replies[rank] = Reply(0.0, None, sent, [], [])
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
