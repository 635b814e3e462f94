"""The trusted side of the sandbox: starts the ranks' processes, plays a case on them, ends them.

Each rank of a simulation is driven by `_Driver`: it waits for what the rank's process wants to do
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
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from dtlab import topology
from dtlab.comm import Comm, Recv, Send, Work
from dtlab.errors import Deadlock, DtlabError, waiting_table
from dtlab.grading import inmate
from dtlab.grading.case import Case, Failure, Outcome, Submission
from dtlab.grading.wire import Hangup, Link, Silence, decode, link_pair, tensor_bytes, tensor_from
from dtlab.simulator import simulate

CASE_LIMIT_S = 2.5  # of real time; a right answer takes a few hundredths
PATIENCE = 6  # on a busy machine, so many times longer for a process that gets no processor
REQUESTS_PER_RANK = 3_000  # of one call; a right answer makes a few dozen
MEMORY_BYTES = 1 << 30  # what a rank may take on top of what it starts with
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class Sealed(NamedTuple):
    """An object on its way between two learners' processes; the referee never opens it."""

    data: bytes


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
            starved = state == "R" and used_s - self._used_s < limit_s / 2
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
        play = _Play(case, outcome, self._inmates)
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


class _Aborted(Exception):
    """A rank gave no result; `outcome.failure` says why."""


class _Play:
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
                                             pickle.dumps(args),
                                             until_s=time.monotonic() + CASE_LIMIT_S)

    def simulate(self) -> None:
        """Run the case in the simulator, every rank driven by its process; fill the outcome."""
        case, outcome = self.case, self.outcome
        network = topology.uniform(case.ranks, case.latency_s, case.bandwidth_Bps)
        try:
            result = simulate(lambda comm: _Driver(comm, self).run(), network=network, echo=False)
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
        raise _Aborted

    def hear(self, rank: int) -> tuple[dict[str, Any], list[bytes]]:
        """What the process of `rank` says next; fails the case if that is nothing."""
        try:
            return self.inmates[rank].listen(CASE_LIMIT_S)
        except Silence:
            self.fail(self._hung(rank))
        except Hangup as error:
            how = self.inmates[rank].how_it_ended() or str(error)
            self.fail(Failure("died", rank, message=how, at=self.lines[rank]))

    def _hung(self, rank: int) -> Failure:
        """Ask a rank that doesn't answer where it is; perhaps it still can say."""
        at = ""
        with suppress(Silence, Hangup, ProcessLookupError):
            os.kill(self.inmates[rank].pid, signal.SIGUSR1)
            at = str(self.inmates[rank].link.recv(time.monotonic() + 1.0)[0].get("at", ""))
        return Failure("hung", rank, message=f"no end after {CASE_LIMIT_S} s", at=at)


class _Refused(Work):
    """A message that could not be posted."""

    def __init__(self, error: DtlabError):
        self._error = error

    def wait(self) -> int:
        raise self._error


class _Driver:
    """Does in the simulator what the process of one rank asks for."""

    def __init__(self, comm: Comm, play: _Play):
        self.comm, self.play, self.rank = comm, play, comm.rank
        self.groups = [comm]
        self.works: dict[int, tuple[Work, Any]] = {}
        self.spans: list[AbstractContextManager[None]] = []

    def run(self) -> None:
        """Serve the process until its function returns."""
        for _ in range(REQUESTS_PER_RANK):
            said, blobs = self.play.hear(self.rank)
            try:
                if self._returned(said, blobs):
                    return
                answer = getattr(self, f"_do_{said['do']}")(said, blobs)
            except DtlabError as error:
                answer = {"error": type(error).__name__, "message": str(error)}, ()
            except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
                self.play.fail(Failure("died", self.rank, message=f"it spoke nonsense ({error})"))
            if answer is not None:
                self._answer(*answer)
        self.play.fail(Failure("chatter", self.rank, at=self.play.lines[self.rank],
                               message=f"more than {REQUESTS_PER_RANK:,} operations"))

    def _returned(self, said: dict[str, Any], blobs: list[bytes]) -> bool:
        """Is this the end of the function? Notes its result, or fails with what it raised."""
        outcome, rank = self.play.outcome, self.rank
        self.play.lines[rank] = str(said.get("at") or self.play.lines[rank])
        if said["do"] in ("return", "raise"):
            outcome.printed[rank] = str(said["printed"])
        if said["do"] == "raise":
            self.play.fail(Failure("raised", rank, str(said["error"]), str(said["message"]),
                                   str(said["at"]), str(said["traceback"])))
        if said["do"] != "return":
            return False
        outcome.values[rank] = decode(said["value"], blobs)
        outcome.after[rank] = decode(said["after"], blobs)
        outcome.peak_bytes[rank] = int(said["peak"])
        return True

    def _answer(self, header: dict[str, Any], blobs: tuple[bytes, ...]) -> None:
        with suppress(Silence, Hangup):  # it shows when we listen again
            self.play.inmates[self.rank].link.send(header, *blobs,
                                                   until_s=time.monotonic() + CASE_LIMIT_S)

    # ---- what a rank may ask for; None: no answer is due ----------------------------------------

    def _do_send(self, said: dict[str, Any], blobs: list[bytes]) -> None:
        if said["tensor"] is None:
            x: Any = Sealed(blobs[0])
        else:
            x = tensor_from(blobs[0], *said["tensor"])
        self._post(said, Send(x, int(said["peer"])), None)

    def _do_recv(self, said: dict[str, Any], blobs: list[bytes]) -> None:
        if said["tensor"] is None:
            into: Any = []
        else:
            dtype, shape = said["tensor"]
            into = torch.empty(shape, dtype=getattr(torch, dtype))
        self._post(said, Recv(into, said["peer"]), into)

    def _post(self, said: dict[str, Any], op: Send | Recv, into: Any) -> None:
        group = self.groups[said["group"]]
        work: Work
        try:
            with group.labelled(str(said["label"])):
                work = group.post(op)[0]
        except DtlabError as error:
            work = _Refused(error)  # no answer is due now: the rank learns of it when it waits
        self.works[int(said["work"])] = work, into

    def _do_wait(self, said: dict[str, Any], _: list[bytes]) -> Any:
        work, into = self.works.pop(int(said["work"]))
        peer = work.wait()
        if into is None:
            return {"peer": peer}, ()
        data = tensor_bytes(into) if isinstance(into, torch.Tensor) else into[0].data
        return {"peer": peer}, (data,)

    def _do_now(self, *_: Any) -> Any:
        return {"now": self.comm.now()}, ()

    def _do_compute(self, said: dict[str, Any], _: list[bytes]) -> Any:
        span = self.comm.compute(str(said["label"]), float(said["seconds"]))
        span.__enter__()
        self.spans.append(span)
        return {}, ()

    def _do_computed(self, *_: Any) -> Any:
        self.spans.pop().__exit__(None, None, None)
        return {}, ()

    def _do_agree(self, said: dict[str, Any], _: list[bytes]) -> Any:
        return {"votes": self.groups[said["group"]]._agree(said["value"])}, ()

    def _do_context(self, said: dict[str, Any], _: list[bytes]) -> Any:
        return {"context": self.groups[said["group"]]._next_context()}, ()

    def _do_subgroup(self, said: dict[str, Any], _: list[bytes]) -> Any:
        new = self.groups[said["group"]]._subgroup(said["ranks"], int(said["context"]))
        self.groups.append(new)
        return {"group": len(self.groups) - 1, "rank": new.rank}, ()
