"""A process for untrusted code: forked without access to the referee, limited, and ended for sure.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dtlab.grading.frames import (
    ConnectionClosed,
    Frame,
    FrameSocket,
    FrameTimeout,
    frame_socket_pair,
)

STARVED_FACTOR = 6  # on a busy machine, a process that gets no processor may take this much longer
MEMORY_BYTES = 1 << 30  # what a process may take on top of what it starts with
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class UntrustedProcess:
    """A process for untrusted code. `serve` is what it does with its end of the socket."""

    def __init__(self, serve: Callable[[FrameSocket], None]):
        self.socket, there = frame_socket_pair()
        self._queued: defaultdict[int, deque[Frame]] = defaultdict(deque)  # by stream
        self.pid = os.fork()
        if self.pid == 0:
            _become_untrusted(there, serve)
        there.close()

    def start_timing(self) -> None:
        """From now on its time counts."""
        self._since_s, self._used_s = time.monotonic(), self._processor_s()

    def recv(self, limit_s: float, stream: int = 0) -> Frame:
        """The next frame of one of its streams; those of others are kept until they are wanted.

        Raises `FrameTimeout` if none has come `limit_s` after `start_timing`; but a process that
        only waits for a processor, on a busy machine, may take longer. Raises `ConnectionClosed`.
        """
        while not self._queued[stream]:
            frame = self._next_frame(limit_s)
            self._queued[frame.stream].append(frame)
        return self._queued[stream].popleft()

    def _next_frame(self, limit_s: float) -> Frame:
        until_s = self._since_s + limit_s
        while not self.socket.wait(until_s):
            starved = self._processor_s() - self._used_s < limit_s / 4 and self._would_run()
            if self.socket.wait(0.0):  # it came while we looked
                break
            if not starved or until_s > self._since_s + STARVED_FACTOR * limit_s:
                raise FrameTimeout
            until_s += 0.5
        return self.socket.recv(time.monotonic() + limit_s)

    def place(self, stream: int) -> str:
        """In which of the learner's lines a stream of this sandboxed rank is; "" if it can't say.
        """
        until_s = time.monotonic() + 1.0
        with suppress(FrameTimeout, ConnectionClosed, ProcessLookupError, AttributeError):
            os.kill(self.pid, signal.SIGUSR1)
            while True:
                frame = self.socket.recv(until_s)
                if frame.kind == "hang":
                    return str(frame.fields["places"].get(str(stream), ""))
        return ""

    def _processor_s(self) -> float:
        """Seconds that its threads have run; 0 if it is gone, or where there is no /proc."""
        return sum(map(int, _stat(Path(f"/proc/{self.pid}"))[11:13])) / os.sysconf("SC_CLK_TCK")

    def _would_run(self) -> bool:
        """Does one of its threads run, or would if it got a processor, or its memory?

        Looks several times: threads that wake each other may all seem to wait in one look.
        """
        for _ in range(5):
            threads = Path(f"/proc/{self.pid}/task").glob("*")
            if any(_stat(thread)[:1] in (["R"], ["D"]) for thread in threads):
                return True
            time.sleep(0.01)
        return False

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
        self.socket.close()


def _stat(task: Path) -> list[str]:
    """What Linux says of a process or thread, its state first; nothing if it has ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _become_untrusted(sock: FrameSocket, serve: Callable[[FrameSocket], None]) -> None:
    """In the new process: close all that it shares with the referee, then serve it."""
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent()
        os.closerange(3, sock.fileno())
        os.closerange(sock.fileno() + 1, 1024)
        limit_resources()
        serve(sock)
    except ConnectionClosed:
        code = 0  # the referee is done
    finally:
        os._exit(code)


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends, however it ends."""
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
