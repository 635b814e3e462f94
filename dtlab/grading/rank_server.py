"""The server process from which a submission's processes are forked, and the referee's end of it.

The server has loaded torch, so that a rank starts in milliseconds. It never holds a case, an
expected value, a solution or another rank's data, so that no rank inherits one. The referee does
not rely on the server to kill and watch the ranks: it does so itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from dtlab.errors import DtlabError
from dtlab.grading.absent import take_out
from dtlab.grading.frames import FrameSocket, frame_socket_pair
from dtlab.grading.isolation import start_isolated
from dtlab.grading.sandboxed_process import run_untrusted
from dtlab.grading.system_calls import can_restrict
from dtlab.processes.forking import die_with_parent, share_memory
from dtlab.ranks.unwritten import unwritten_is_nan

START_LIMIT_S = 120.0  # loading torch takes seconds, on a busy machine many
ANSWER_LIMIT_S = 20.0
_LARGEST = 4096  # bytes of a command or an answer
_PROGRAM = """import sys
from dtlab.grading.absent import keep_only
keep_only(sys.argv[2:])
from dtlab.grading.rank_server import main
main()"""


class ServerEnded(DtlabError):
    """The rank server is gone: a process of the submission has ended it."""


class RankServer:
    """The referee's end. Use it as a context manager: at the end, all its processes are killed.

    sandbox: where it runs (`isolation.choose_sandbox`); "none" forks this process, which then must
    hold nothing secret, have no threads, and have run no backward: where there is a GPU, autograd
    refuses to work in a fork of a process that has used it. library: the parts of this package
    ("collectives", …) that its ranks find besides what a rank is made of; in "none" they find all.
    """

    def __init__(self, sandbox: str, library: Sequence[str] = ()):
        here, there = socket.socketpair()
        self._control = here
        self._program: subprocess.Popen[bytes] | None = None
        self._pid = 0
        if sandbox == "none":
            self._pid = os.fork()
            if self._pid == 0:
                here.close()
                _run_server(there.detach(), library, can_restrict())
        else:
            arguments = ["-c", _PROGRAM, str(there.fileno()), *library]
            self._program = start_isolated(sandbox, arguments, there.fileno(), library)
        there.close()
        self.ended = False  # has a process of the submission ended the server?
        self._limit_s = START_LIMIT_S  # for its first answer; later ones have `ANSWER_LIMIT_S`

    def __enter__(self) -> RankServer:
        return self

    def __exit__(self, *_error: object) -> None:
        self._control.close()
        if self._program is not None:
            self._program.kill()
            self._program.wait()
        else:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def fork(self) -> tuple[FrameSocket, int, int]:
        """Fork a process. Return its socket, its pid here, and its pid in the server's namespace.
        """
        here, there = frame_socket_pair()
        answer, fds = self._ask({"do": "fork"}, [there.fileno()])
        there.close()
        inside = int(answer["pid"])
        return here, _pid_of(fds, inside), inside

    def how_it_ended(self, pid: int) -> str:
        """Return "exit code 3" or "signal SIGSEGV"; "" if it is alive. pid: in the server's
        namespace."""
        return str(self._ask({"do": "look", "pid": pid})[0]["ended"])

    def forget(self, pid: int) -> None:
        """Reap a process that has been killed. pid: in the server's namespace."""
        self._ask({"do": "forget", "pid": pid})

    def _ask(self, command: dict[str, object], fds: Sequence[int] = ()
             ) -> tuple[dict[str, Any], list[int]]:
        try:
            self._control.settimeout(self._limit_s)
            socket.send_fds(self._control, [json.dumps(command).encode()], fds)
            text, received, _, _ = socket.recv_fds(self._control, _LARGEST, 1)
            answer: dict[str, Any] = json.loads(text)
            self._limit_s = ANSWER_LIMIT_S
            return answer, received
        except (OSError, ValueError) as error:
            self.ended = True
            raise ServerEnded(f"the process that starts a submission's processes ended "
                              f"({type(error).__name__})") from None


def _pid_of(fds: list[int], inside: int) -> int:
    """Return the pid here of a process that has the pid `inside` in the server's namespace."""
    if not fds:
        return inside
    try:
        lines = Path(f"/proc/self/fdinfo/{fds[0]}").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))
    finally:
        os.close(fds[0])


# ---- the server itself --------------------------------------------------------------------------


def _run_server(fd: int, library: Sequence[str], restricted: bool) -> None:
    """Serve on this socket until its other end is closed; then end this process."""
    try:
        die_with_parent()
        os.closerange(3, fd)
        os.closerange(fd + 1, 1024)
        tempfile.gettempdir()  # caches it: torch needs it, and a rank may not write to find one
        for name in library:
            if not name.startswith("-"):
                import_module(f"dtlab.{name}")
        take_out(library)
        if restricted:
            import_module("pyseccomp")
        import numpy.random  # noqa: F401

        share_memory()
        with unwritten_is_nan():  # a grade must not depend on what was in memory
            _serve(socket.socket(fileno=fd), restricted)
    except OSError:
        pass  # the referee is gone
    finally:
        os._exit(0)


def _serve(control: socket.socket, restricted: bool) -> None:
    while True:
        text, fds, _, _ = socket.recv_fds(control, _LARGEST, 1)
        if not text:
            return
        command = json.loads(text)
        pid = int(command.get("pid", 0))
        answer: dict[str, object] = {}
        given: list[int] = []
        if command["do"] == "fork":
            pid = _fork_rank(control, fds[0], restricted)
            answer = {"pid": pid}
            given = [os.pidfd_open(pid)] if hasattr(os, "pidfd_open") else []
        elif command["do"] == "look":
            answer = {"ended": _how_it_ended(pid)}
        elif command["do"] == "forget":
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        socket.send_fds(control, [json.dumps(answer).encode()], given)
        for each in given:
            os.close(each)


def _fork_rank(control: socket.socket, fd: int, restricted: bool) -> int:
    pid = os.fork()
    if pid:
        os.close(fd)
        return pid
    try:
        control.close()
        run_untrusted(FrameSocket(socket.socket(fileno=fd)), restricted)
    finally:
        os._exit(1)


def _how_it_ended(pid: int) -> str:
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return ""
    if info.si_code == os.CLD_EXITED:
        return f"exit code {info.si_status}"
    return f"signal {signal.Signals(info.si_status).name}"


def main() -> None:
    """Run the server as a program: arguments are the socket's number, and the library."""
    _run_server(int(sys.argv[1]), sys.argv[2:], restricted=True)
