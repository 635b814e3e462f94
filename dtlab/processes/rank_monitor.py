"""One rank as the launcher sees it; and which rank's failure ends a run."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from dtlab.errors import ConfigError, RankDied
from dtlab.processes import failures
from dtlab.processes.control_channel import ChannelClosed, ControlChannel
from dtlab.ranks.output import RankOutput
from dtlab.tracebacks import PACKAGE, shown_name

GRACE_S = 1.0  # how long the launcher waits to hear why a connection has broken
_READ_BYTES = 1 << 20
_LOOK_S = 0.25  # how long a rank is watched for whether it uses processor time
_ANSWER_S = 1.0  # how long a rank may take to say at which line it is, if it can
_STACK_ENDS = ("in <module>\n", "  ...\n", "<no Python frame>\n")  # as faulthandler writes it


class RankHandle:
    """The launcher's end of one rank."""

    def __init__(self, number: int, control: ControlChannel, store: ControlChannel, output: int,
                 restarted: bool = False):
        self.number, self.control, self.store, self.pipe = number, control, store, output
        self.restarted = restarted  # started in the place of one that died
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.output: RankOutput | None = None
        self.pid = 0  # known once it is ready
        self.ready = False
        self.result_fd: int | None = None  # the file with its `Reply`
        self.failure: tuple[float, failures.CapturedError] | None = None
        self.stopped = False  # did not begin, as another rank could not
        self.wait_status: int | None = None  # see `fork_server_main.STATUS`

    def begin(self, output: RankOutput) -> None:
        """Begin a new call: nothing is known of it yet."""
        self.output = output
        self.ready, self.result_fd, self.failure, self.stopped = False, None, None, False

    @property
    def answered(self) -> bool:
        """Has the rank said how the call ended?"""
        return self.result_fd is not None or self.failure is not None or self.stopped

    def read_frames(self) -> bool:
        """Take the frames that have come. False: the rank has closed its end."""
        try:
            frames = self.control.ready_frames()
        except ChannelClosed:
            return False
        for frame, fds in frames:
            if frame[0] == "ready":
                self.ready, self.pid = True, frame[1]
            elif frame[0] == "returned":
                self.result_fd = fds[0]
            elif frame[0] == "raised":
                self.failure = (frame[1], frame[2])
            else:
                self.stopped = True
        return True

    def close(self) -> None:
        """Let go of all its files."""
        self.control.close()
        self.store.close()
        os.close(self.pipe)
        if self.result_fd is not None:
            os.close(self.result_fd)

    def read_output(self) -> bytes | None:
        """Take some of what it printed. None: nothing now; empty: its pipe has ended."""
        try:
            data = os.read(self.pipe, _READ_BYTES)
        except BlockingIOError:
            return None
        if self.output:
            self.output.feed(self.decoder.decode(data))
        return data


def raise_failure(ranks: Sequence[RankHandle], server_gone: bool,
                  may_die: Collection[int] = ()) -> None:
    """Raise for the rank that is to blame, if any: the dead first, then the first that raised. The
    death of those that `may_die` is no failure."""
    died = [(rank.wait_status, number) for number, rank in enumerate(ranks)
            if rank.wait_status is not None and number not in may_die]
    if died:  # Gloo may abort a rank whose peer died: others come before an abort
        status, number = min(died, key=lambda d: d[0] & 0x7F == signal.SIGABRT)
        raise cannot_start(number, -status) if status < 0 else _rank_died(number, status)
    if server_gone:
        raise RankDied("the server that had started the ranks is gone, and they with it; "
                       "run again, and a new one is started")
    raised = [(failure.secondary, when, number, failure) for number, rank in enumerate(ranks)
              if rank.failure for when, failure in [rank.failure]]
    if raised:
        secondary, when, number, failure = min(raised, key=lambda r: r[:3])
        if not secondary or time.perf_counter() - when > GRACE_S:
            dead = [n for n, rank in enumerate(ranks) if rank.wait_status is not None]
            raise failures.rank_failed(number, failure, dead)


def describe_death(status: int) -> str:
    """Say how a rank died in a word or two, for the table of what ranks were doing."""
    if status < 0:
        return "could not be started"
    code = os.waitstatus_to_exitcode(status)
    return f"died (exit code {code})" if code >= 0 else f"died ({signal.Signals(-code).name})"


def cannot_start(number: int, error: int) -> ConfigError:
    """Return the error for a process that the system refuses with this errno."""
    return ConfigError(f"the system starts no process for rank {number}: {os.strerror(error)}; "
                       f"allow more processes (ulimit -u) or memory, or take fewer ranks")


def _rank_died(number: int, status: int) -> RankDied:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        how = f"its process ended with exit code {code} before its function returned (sys.exit?)"
    else:
        how = f"killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += " (perhaps by the system, for want of memory)"
        elif -code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE):
            how += " (a crash in compiled code; what it printed last says where)"
    return RankDied(f"rank {number} died: {how}", number, code)


def _read(pipe: int) -> str:
    """Read what the pipe holds now, without waiting."""
    try:
        return os.read(pipe, 1 << 16).decode(errors="replace")
    except BlockingIOError:
        return ""


def current_stack(rank: RankHandle, diagnosis: int) -> list[str]:
    """The learner's lines in the stack of a rank, the innermost first. It may hang in C: its
    faulthandler tells."""
    if not rank.pid or rank.wait_status is not None:
        return []
    _read(diagnosis)  # what another rank was too slow to say
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank.pid, signal.SIGUSR1)
    text, deadline = "", time.monotonic() + _ANSWER_S
    while not text.endswith(_STACK_ENDS) and time.monotonic() < deadline:
        more = _read(diagnosis)  # it comes in pieces: on a busy machine with pauses between them
        text += more
        if not more:
            time.sleep(0.01)
    lines = []
    for file, line, function in re.findall(r'File "(.*)", line (\d+) in (.*)', text):
        if file != "<string>" and not file.startswith((PACKAGE, sys.prefix, sys.base_prefix)):
            name = shown_name(file)
            lines.append(f"{Path(file).name if name == file else name}:{line} in {function}")
    return lines


def is_stopped(rank: RankHandle) -> bool:
    """Is its process stopped, by SIGSTOP or a debugger? It may be so within a message, too."""
    return _activity(rank.pid)[0] in "Tt"


def describe_activity(rank: RankHandle) -> str:
    """Describe the state of a rank that is not waiting: slow is not dead. "" if it is unknown."""
    if is_stopped(rank):
        return "is stopped (SIGSTOP, or a debugger)"
    before = _activity(rank.pid)[1]
    time.sleep(_LOOK_S)
    state, used = _activity(rank.pid)
    if state == " ":
        return ""
    if used > before + 1:  # threads that wait use a little, and so may end a tick
        return "is slow, not dead: it computes"
    return "stands still: it uses no processor time"


def _activity(pid: int) -> tuple[str, int]:
    """State, and the clock ticks of processor time that all threads of a process have used; " " and
    0 where there is no /proc, or if it has just died."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return " ", 0
