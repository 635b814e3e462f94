"""The fork server: one process with torch loaded, from which ranks are forked in milliseconds.

Why not `multiprocessing.forkserver`: it imports the caller's `__main__` again, leaves its socket
file behind when the caller is killed, and does not pass open files along. Ours has no name
anywhere: the parent holds one end of a socket pair, and when that end closes, all is over.

    parent ── socket pair ── server        one byte and a channel: "here is a new crew"
    parent ── channel ────── server        one byte and a control socket: "fork a rank on it";
                                           back come (rank, wait status) as ranks end
    parent ── control ────── rank          see rank.py

A crew lives as long as the parent's end of its channel: when that closes or is shut, for whatever
reason, the server kills the crew.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading

from dtlab.errors import ConfigError

STATUS = struct.Struct("<ii")  # rank, wait status
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
# Forking copies the tables of the server's memory, page by page. With its heap in huge pages there
# are so few that a fork takes 0.6 ms instead of 3.5. Ranks get the caller's environment instead.
# Ranks keep memory that they have freed, in one heap for all their threads: a fresh tensor would
# else fault in page by page. Measured in training steps: 16 000 page faults instead of 56 000.
HUGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": ":".join((
    "glibc.malloc.hugetlb=1", "glibc.malloc.mmap_max=0",
    "glibc.malloc.trim_threshold=1099511627776", "glibc.malloc.arena_max=1"))}
# A rank's second thread sleeps while it has nothing to do: another rank wants that core.
PASSIVE = {"OMP_WAIT_POLICY": "passive"}
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); " \
        "from dtlab.processes.server import main; main(int(sys.argv[1]))"


# ---- in the parent ------------------------------------------------------------------------------


class ForkServer:
    """The parent's view of its server."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | ONE_THREAD | HUGE_PAGES | PASSIVE,
                start_new_session=True,  # Ctrl-C in a terminal is for the parent alone
            )
        self.owner = os.getpid()
        self._sock = ours

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Usable by this process? A fork of its parent has to start its own."""
        return self.owner == os.getpid() and self._process.poll() is None

    def new_crew(self) -> socket.socket:
        """A channel on which ranks can be asked for, see `ask_rank`. `OSError` if it is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._sock, [b"c"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """Hang up: the server kills what it still runs, and ends."""
        self._sock.close()
        if self.owner == os.getpid():
            self._process.wait()


_server: ForkServer | None = None
_starting = threading.Lock()


def fork_server() -> ForkServer:
    """This process's server, started on the first call (about a second: it imports torch)."""
    global _server
    if not hasattr(os, "fork"):
        raise ConfigError("real processes need Linux or macOS (under Windows: WSL); "
                          "dtlab.simulate works everywhere")
    with _starting:
        if _server is None or not _server.alive:
            if _server is not None:
                _server.close()
            _server = ForkServer()
        return _server


def new_crew() -> socket.socket:
    """A channel on which this process's server forks ranks."""
    try:
        return fork_server().new_crew()
    except OSError:  # it has just been killed
        fork_server().close()
        return fork_server().new_crew()


def ask_rank(channel: socket.socket, control: socket.socket) -> None:
    """Have the next rank of this crew forked; it will listen on the other end of `control`."""
    socket.send_fds(channel, [b"r"], [control.fileno()])


# ---- in the server ------------------------------------------------------------------------------


class _Crew:
    def __init__(self, channel: socket.socket):
        self.channel = channel
        self.asked = 0  # how many ranks so far
        self.alive: dict[int, int] = {}  # pid → rank


class _Server:
    def __init__(self, parent: socket.socket):
        self._parent = parent
        self._crews: list[_Crew] = []
        self._select = selectors.DefaultSelector()
        self._select.register(parent, selectors.EVENT_READ, self._on_parent)
        self._wake, self._waker = socket.socketpair()  # SIGCHLD writes a byte here
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._select.register(self._wake, selectors.EVENT_READ, self._on_child)
        self._watch_parent()

    def _watch_parent(self) -> None:
        """A fork of the parent may hold its socket open after it is gone; its pid tells too."""
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._select.register(os.pidfd_open(os.getppid()), selectors.EVENT_READ, self._end)

    def serve(self) -> None:
        """Until the parent is gone."""
        while True:
            for key, _ in self._select.select():
                if key.fileobj in self._select.get_map():  # not closed by an earlier event
                    key.data()

    def _on_parent(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._parent, 1, 1)
        if not data:
            self._end()
        crew = _Crew(socket.socket(fileno=fds[0]))
        self._crews.append(crew)
        self._select.register(crew.channel, selectors.EVENT_READ, lambda: self._on_crew(crew))

    def _on_crew(self, crew: _Crew) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(crew.channel, 1, 1)
        except ConnectionError:
            data = b""
        if data:
            self._fork(crew, fds[0])
            return
        self._select.unregister(crew.channel)
        for pid in crew.alive:
            _kill_group(pid)
        self._crews.remove(crew)
        for pid, rank in list(crew.alive.items()):
            self._tell(crew, rank, os.waitpid(pid, 0)[1])
        crew.channel.close()  # the parent reads the end: all gone

    def _fork(self, crew: _Crew, control: int) -> None:
        rank, crew.asked = crew.asked, crew.asked + 1
        pid = os.fork()
        if pid:
            os.close(control)
            crew.alive[pid] = rank
            return
        try:
            self._forget()
            from dtlab.processes.rank import rank_main

            rank_main(socket.socket(fileno=control))
        finally:
            os._exit(70)

    def _forget(self) -> None:
        """In the child: let go of all that is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for key in list(self._select.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._waker.close()
        self._select.close()

    def _on_child(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        for crew in self._crews:
            for pid, rank in list(crew.alive.items()):
                if (status := _ended(pid)) is not None:
                    del crew.alive[pid]
                    self._tell(crew, rank, status)

    def _tell(self, crew: _Crew, rank: int, status: int) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            crew.channel.send(STATUS.pack(rank, status))

    def _end(self) -> None:
        for crew in self._crews:
            for pid in crew.alive:
                _kill_group(pid)
        os._exit(0)


def _ended(pid: int) -> int | None:
    """The wait status of a rank that has ended, None if it lives."""
    if hasattr(os, "waitid"):
        # Look before reaping: while the zombie is there, its number is nobody else's, so that we
        # kill its own children and no stranger.
        if not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return None
        _kill_group(pid)
        return os.waitpid(pid, 0)[1]
    done, status = os.waitpid(pid, os.WNOHANG)
    return status if done else None


def _kill_group(pid: int) -> None:
    """Kill a rank and the processes it started (unless they left its group)."""
    for kill in (os.killpg, os.kill):  # the group is not there yet in a rank's first moments
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def main(fd: int) -> None:
    """The server process: load what ranks need, then fork on demand."""
    import cloudpickle  # noqa: F401
    import numpy.random  # noqa: F401
    import torch

    import dtlab.processes.rank  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, every page that ranks share
    _Server(socket.socket(fileno=fd)).serve()
