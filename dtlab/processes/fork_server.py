"""The fork server: one process with torch loaded, from which ranks are forked in milliseconds.

Why not `multiprocessing.forkserver`: it imports the caller's `__main__` again, leaves its socket
file behind when the caller is killed, and does not pass open files along. Ours has no name
anywhere: the parent holds one end of a socket pair, and when that end closes, all is over.

    parent ── socket pair ── server        one byte and a channel: "a new rank group", that may
                                           train or not (`TRAINING`)
    parent ── channel ────── server        one byte and a control socket: "fork a rank on it";
                                           back come (rank, wait status) as ranks end
    parent ── control ────── rank          see rank_main.py

A rank group lives as long as the parent's end of its channel: when that closes, for whatever
reason, the server kills its ranks.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from dtlab.errors import ConfigError
from dtlab.processes.rank_main import THREAD_VARIABLES

# Settings of the C library's allocator. Huge pages: forking copies the tables of the server's
# memory page by page, and with so few pages a fork takes 0.6 ms instead of 3.5. The others let
# ranks keep the memory that they free: else every tensor of some megabytes would come from the
# system anew, page by page, which costs more than to fill it. See PyTorch's performance tuning
# guide on allocators. Larger ones do come from the system: what was freed seldom fits the next
# aligned tensor (glibc's bug 14581), so that a rank would grow by gigabytes in a hundred steps.
# Ranks get the caller's environment instead.
ALLOCATOR = {
    "GLIBC_TUNABLES": f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold={32 << 20}:"
                      f"glibc.malloc.trim_threshold={1 << 40}:glibc.malloc.arena_max=1",
    "PYTHONMALLOC": "malloc",
}
# What each rank that trains would import itself, for seconds: torch's optimizers need the first.
TRAINING = ("torch._dynamo", "dtlab.parallel", "dtlab.ps")
# A rank's second thread sleeps while it has nothing to do: another rank wants that core.
PASSIVE = {"OMP_WAIT_POLICY": "passive"}
# torch first, without the caller's folder: a file random.py there would hide Python's own from it.
_BOOT = "import json, sys; sys.path[:], home = json.loads(sys.argv[2]); " \
        "import numpy.random, torch; sys.path.insert(0, home); " \
        "from dtlab.processes.fork_server_main import main; main(int(sys.argv[1]))"


class ForkServer:
    """The parent's view of its server."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        one_thread = dict.fromkeys(THREAD_VARIABLES, "1")
        path = json.dumps([_import_path(), str(Path(__file__).parents[2])])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno()), path],
                pass_fds=[theirs.fileno()],
                cwd="/",  # the caller's folder may be gone
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | one_thread | ALLOCATOR | PASSIVE,
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
        """Is it usable by this process? A fork of its parent has to start its own."""
        return self.owner == os.getpid() and self._process.poll() is None

    def new_rank_group(self) -> socket.socket:
        """A channel on which ranks can be asked for, see `ask_rank`. `OSError` if it is gone."""
        ours, theirs = socket.socketpair()
        trains = not sys.modules.keys().isdisjoint(TRAINING)
        with theirs:
            socket.send_fds(self._sock, [b"t" if trains else b"c"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """Hang up: the server kills what it still runs, and ends."""
        self._sock.close()
        if self.owner == os.getpid():
            self._process.terminate()  # it may be importing, and would hear of the rest in seconds
            self._process.wait()


def _import_path() -> list[str]:
    """Return the server's path of imports: the caller's, but without the folder of the notebook or
    script."""
    try:
        beside = {os.getcwd(), os.path.abspath(sys.path[0])}
    except OSError:  # the folder is gone
        beside = set()
    return [entry for entry in sys.path if os.path.isabs(entry) and entry not in beside]


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
            atexit.register(_server.close)
        return _server


def new_rank_group() -> socket.socket:
    """A channel on which this process's server forks ranks."""
    try:
        return fork_server().new_rank_group()
    except OSError:  # it has just been killed
        fork_server().close()
        return fork_server().new_rank_group()


def ask_rank(channel: socket.socket, control: socket.socket) -> None:
    """Have the next rank of this group forked; it will listen on the other end of `control`."""
    socket.send_fds(channel, [b"r"], [control.fileno()])
