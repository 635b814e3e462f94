"""The trusted side of the sandbox: starts the ranks' processes, plays a case on them, ends them.

Each rank of a simulation is driven by `Driver`: it waits for what the rank's process wants to do
and does it in the simulator. Nothing a learner's process says is believed beyond its own messages,
its own result and (for the memory check) its own meter.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from dtlab import topology
from dtlab.errors import Deadlock, DtlabError, waiting_table
from dtlab.grading import inmate
from dtlab.grading.case import Case, Failure, Outcome, Submission
from dtlab.grading.driver import Aborted, Driver
from dtlab.grading.wire import Hangup, Link, Silence, link_pair
from dtlab.simulator import simulate

CASE_LIMIT_S = 2.5  # of real time; a right answer takes a few hundredths
PATIENCE = 6  # on a busy machine, so many times longer for a process that gets no processor
MEMORY_BYTES = 1 << 30  # what a rank may take on top of what it starts with
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class Inmate:
    """A process for untrusted code. `serve` is what it does with its end of the link."""

    def __init__(self, serve: Callable[[Link], None] = inmate.serve):
        self.link, there = link_pair()
        self.pid = os.fork()
        if self.pid == 0:
            _become_inmate(there, serve)
        there.close()

    def begin(self) -> None:
        """From now on its time counts."""
        self._since_s, self._used_s = time.monotonic(), self._processor_s()[1]

    def listen(self, limit_s: float) -> tuple[dict[str, Any], list[bytes]]:
        """What the process says next. `Silence` if it has not spoken `limit_s` after `begin`; but
        one that only waits for a processor, on a busy machine, may take longer."""
        until_s = self._since_s + limit_s
        while not self.link.wait(until_s):
            state, used_s = self._processor_s()
            starved = state == "R" and used_s - self._used_s < limit_s / 4
            if not starved or until_s > self._since_s + PATIENCE * limit_s:
                raise Silence
            until_s += 0.5
        return self.link.recv(time.monotonic() + limit_s)

    def _processor_s(self) -> tuple[str, float]:
        """Its state ("R": runs, or would if it got a processor) and the seconds that it has run."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return "", 0.0  # it is gone, or this isn't Linux
        return stat[0], (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def how_it_ended(self) -> str:
        """"exit code 3", "signal SIGSEGV"; "" if it is alive."""
        for _ in range(100):  # the socket closes a moment before the process is gone
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is not None and info.si_code == os.CLD_EXITED:
                return f"exit code {info.si_status}"
            if info is not None:
                return f"signal {signal.Signals(info.si_status).name}"
            time.sleep(0.002)
        return ""

    def end(self) -> None:
        """Kill the process and all that it started (unless it left its group)."""
        for kill in (os.killpg, os.kill):  # in its first moments it has no group yet
            with suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.link.close()


def _become_inmate(link: Link, serve: Callable[[Link], None]) -> None:
    """In the new process: cut all ties with the referee, then serve it."""
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent()
        os.closerange(3, link.fileno())
        os.closerange(link.fileno() + 1, 1024)
        limit_resources()
        serve(link)
    except Hangup:
        code = 0  # the referee is done
    finally:
        os._exit(code)


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends, whatever ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_resources() -> None:
    """No files (so none can be shared), no memory beyond reason, no core dumps."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        ceiling = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (ceiling, ceiling))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Sandbox:
    """Plays cases of one submission."""

    def __init__(self, submission: Submission):
        self._submission = submission
        self._inmates: list[Inmate] = []

    def play(self, case: Case) -> Outcome:
        """Call the function on every rank of `case`. A failure ends the ranks' processes, so that
        the next case starts afresh."""
        while len(self._inmates) < case.ranks:
            self._inmates.append(Inmate())
        outcome = Outcome([None] * case.ranks, [()] * case.ranks, 0.0,
                          peak_bytes=[0] * case.ranks, printed=[""] * case.ranks)
        play = Play(case, outcome, self._inmates)
        play.order(self._submission)
        play.simulate()
        if outcome.failure:
            self.close()
        return outcome

    def close(self) -> None:
        """End all processes."""
        for each in self._inmates:
            each.end()
        self._inmates = []


class Play:
    """One case on its way."""

    def __init__(self, case: Case, outcome: Outcome, inmates: list[Inmate]):
        self.case, self.outcome, self.inmates = case, outcome, inmates
        self.lines = [""] * case.ranks  # where each rank was when it last asked

    def order(self, submission: Submission) -> None:
        """Tell every rank to begin."""
        case = self.case
        place = {"path": submission.path, "cwd": submission.cwd, "sources": submission.sources}
        for rank, args in enumerate(case.args):
            header = {"rank": rank, "size": case.ranks, "comm": case.comm, "meter": case.meter}
            # Silence or Hangup show when the rank's answer is awaited.
            self.inmates[rank].begin()
            with suppress(Silence, Hangup):
                self.inmates[rank].link.send({**header, **place}, submission.pickled,
                                             pickle.dumps(args), pickle.dumps(case.harness),
                                             until_s=time.monotonic() + CASE_LIMIT_S)

    def simulate(self) -> None:
        """Run the case in the simulator, every rank driven by its process; fill the outcome."""
        case, outcome = self.case, self.outcome
        network = case.cluster or topology.uniform(case.ranks, case.latency_s, case.bandwidth_Bps)
        try:
            result = simulate(lambda comm: Driver(comm, self).run(), network=network, echo=False)
        except Deadlock as error:
            rows = [row._replace(line=self.lines[row.rank]) for row in error.waiting]
            outcome.failure = Failure("deadlock", error="Deadlock", details=waiting_table(rows),
                                      message="every rank that is left waits for another")
        except DtlabError as error:
            if outcome.failure is None:  # a bug of ours rather than of the learner
                outcome.failure = Failure("raised", error=type(error).__name__, message=str(error))
        else:
            outcome.elapsed_s, outcome.trace = result.elapsed_s, result.trace

    def fail(self, failure: Failure) -> NoReturn:
        """Give up: the first failure is the one that counts."""
        if self.outcome.failure is None:
            self.outcome.failure = failure
        raise Aborted

    def hear(self, rank: int) -> tuple[dict[str, Any], list[bytes]]:
        """What the process of `rank` says next; fails the case if that is nothing."""
        try:
            return self.inmates[rank].listen(CASE_LIMIT_S)
        except Silence:
            self.fail(self._hung(rank))
        except Hangup as error:
            how = self.inmates[rank].how_it_ended() or str(error)
            self.fail(Failure("died", rank, message=how, at=self.lines[rank]))

    def answer(self, rank: int, header: dict[str, Any], blobs: Sequence[bytes]) -> None:
        """Say something to the process of `rank`."""
        with suppress(Silence, Hangup):  # it shows when we listen again
            self.inmates[rank].link.send(header, *blobs,
                                         until_s=time.monotonic() + CASE_LIMIT_S)

    def _hung(self, rank: int) -> Failure:
        """Ask a rank that doesn't answer where it is; perhaps it still can say."""
        at = ""
        with suppress(Silence, Hangup, ProcessLookupError):
            os.kill(self.inmates[rank].pid, signal.SIGUSR1)
            at = str(self.inmates[rank].link.recv(time.monotonic() + 1.0)[0].get("at", ""))
        return Failure("hung", rank, message=f"no end after {CASE_LIMIT_S} s", at=at)
