"""One rank: what a freshly forked process does until the launcher closes its channel."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import faulthandler
import linecache
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from dtlab.processes import failures
from dtlab.processes.communicator import ProcessComm
from dtlab.processes.connections import Connections
from dtlab.processes.control_channel import ChannelClosed, ControlChannel
from dtlab.processes.endpoint import Endpoint, Reply
from dtlab.processes.forking import die_with_parent
from dtlab.processes.process_group import (
    join_group,
    open_communicator,
    open_endpoint,
    open_late,
)
from dtlab.processes.shared_status import RAISED, RETURNED, RUNNING, STARTING, SharedStatus
from dtlab.processes.store import RankStore
from dtlab.ranks import serialization

THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"
)
_GLOO = {
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",  # loopback, nothing else
    "GLOO_ENABLE_STORE_V2_API": "1",  # ask the store for all addresses at once
}
# Torch would note the Python stack of every message, in case someone asks. Who asks may set it.
_NO_FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "0"}
_NO_DISPLAY = {"MPLBACKEND": "Agg"}  # a notebook's own backend would need its kernel
_libc = ctypes.CDLL(None)


class Settings(NamedTuple):
    """A rank's settings at its start. Beside them come files: output, diagnosis, status, store."""

    rank: int
    size: int
    backend: str
    device: str
    threads: int
    trace: bool
    env: dict[str, str]
    cwd: str
    path: list[str]
    dtype: torch.dtype  # the default
    new: bool = False  # in the place of a rank that has died


def rank_main(sock: socket.socket) -> NoReturn:
    """The life of a rank. Ends the process."""
    die_with_parent()
    os.setpgid(0, 0)  # so that what the rank starts can be stopped with it
    control = ControlChannel(sock)
    with contextlib.suppress(ChannelClosed, OSError):  # the launcher said goodbye, or is gone
        Rank(control, *control.recv()).serve()
    _flush()
    os._exit(0)


class Rank:
    """The child's side of `dtlab.processes.launcher.RankGroup`."""

    def __init__(self, control: ControlChannel, settings: Settings, fds: list[int]):
        self._control, self._settings, self._pid = control, settings, os.getpid()
        output, diagnosis, status, store = fds
        _adopt(settings, output, diagnosis)
        self._status = SharedStatus(status, settings.size)
        os.close(status)
        self._store = RankStore(ControlChannel(socket.socket(fileno=store)))
        self._namespace: dict[str, Any] = {"__name__": "__main__"}
        self._end: Endpoint | None = None
        self._comm: ProcessComm | None = None
        self._run_number = -1

    def serve(self) -> None:
        """Do what the launcher asks, until it closes its end (`ChannelClosed`)."""
        while True:
            (what, run_number), fds = self._control.recv()
            try:
                comm = self._communicator(run_number)
                work = self._call(fds[0], comm) if what == "call" else self._execute(fds[0], comm)
                comm.end.writer.does(RUNNING)
                self._control.send(("ready", os.getpid()))
                (word, start_s, *how), _ = self._control.recv()
                if word == "stop":  # another rank could not get ready
                    self._control.send(("stopped",))
                    continue
                comm.end.begin_run(start_s)
                comm.end.may_die, comm.end.in_session = how
                value = work()
                if os.getpid() != self._pid:  # a child that `work` forked: its parent answers
                    raise SystemExit
                comm.end.end_run()
                file = self._pack(value, comm)
            except SystemExit as goodbye:
                _exit(goodbye)
            except ChannelClosed:
                raise
            except BaseException as error:
                if os.getpid() != self._pid:
                    traceback.print_exception(error)
                    _exit(SystemExit(1))
                self._say(RAISED)
                _flush()
                self._control.send(("raised", time.perf_counter(), failures.capture(error)))
                continue
            self._say(RETURNED)
            self._control.send(("returned",), [file])
            os.close(file)

    def _say(self, doing: int) -> None:
        if self._end is not None:
            self._end.writer.does(doing)

    # ---- what is asked --------------------------------------------------------------------------

    def _call(self, fd: int, comm: ProcessComm) -> Callable[[], Any]:
        function, args = serialization.unpack_call(fd)
        # Where pickle looks for classes of the caller's script or notebook, as torch.save does.
        vars(sys.modules["__main__"]).update(
            {name: kind for name, kind in getattr(function, "__globals__", {}).items()
             if isinstance(kind, type) and kind.__module__ == "__main__"})
        return lambda: function(comm, *args)

    def _execute(self, fd: int, comm: ProcessComm) -> Callable[[], Any]:
        """A cell: its last expression, if it ends in one, is shown like a notebook's."""
        source, (name,) = serialization.unpack_call(fd)
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        body = compile(tree, name, "exec")
        shown = compile(ast.Expression(last.value), name, "eval") if last else None
        self._namespace |= {
            "rank": comm.rank, "size": comm.size, "comm": comm, "torch": torch,
            "dtlab": import_module("dtlab"),  # imports this module, so it comes late
        }

        def work() -> str | None:
            exec(body, self._namespace)
            value = eval(shown, self._namespace) if shown else None
            if value is None:
                return None
            self._namespace["_"] = value
            return repr(value)

        return work

    def _pack(self, value: Any, comm: ProcessComm) -> int:
        """A file with the value and this rank's side of the trace."""
        done_s = comm.now()
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None and pyplot.get_fignums():
            print("A figure in a rank's process can't be shown: return its numbers, and draw them "
                  "where you called run.")
            pyplot.close("all")
        _flush()
        with serialization.sending_back(comm.rank, value):
            rows = comm.end.recorder.rows(comm.end.start_s)
            return serialization.pack(Reply(done_s, value, *rows))

    # ---- the group ------------------------------------------------------------------------------

    def _communicator(self, run_number: int) -> ProcessComm:
        """The communicator of all ranks; another one once messages of the last may be astray."""
        if self._end is None and self._settings.new:
            told = self._settings
            self._status.clear_rank(told.rank)
            self._end, self._comm = open_late(told.device, told.rank, told.size, self._status,
                                              told.trace, self._store)
            self._run_number = run_number
        if self._end is None:
            self._end = self._connect()
        if self._comm is None or run_number != self._run_number:
            self._end.forget_contexts()
            self._comm = open_communicator(self._settings.backend, self._end, run_number)
            self._run_number = run_number
        return self._comm

    def _connect(self) -> Endpoint:
        told = self._settings
        self._status.write(told.rank, 0, 0, STARTING)
        connections = Connections()
        with connections:
            join_group(told.backend, self._store, told.rank, told.size)
        return open_endpoint(told.device, told.rank, self._status, told.trace,
                             self._store, connections)


def _adopt(told: Settings, output: int, diagnosis: int) -> None:
    """Make this process look like the one that called `run`; its output goes to the launcher."""
    for target in (1, 2):
        os.dup2(output, target)
    os.close(output)
    sys.stdout = sys.__stdout__ = _stream(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2)  # type: ignore[misc]
    faulthandler.enable(file=2)  # a crash in C says where
    faulthandler.register(signal.SIGUSR1, file=diagnosis, all_threads=False)
    threads = dict.fromkeys(THREAD_VARIABLES, str(told.threads))
    env = _NO_FLIGHT_RECORDER | told.env | threads | _GLOO | _NO_DISPLAY
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    os.environ.update(env.items() - os.environ.items())
    if told.threads != torch.get_num_threads():
        torch.set_num_threads(told.threads)
    with contextlib.suppress(OSError):  # the caller's folder may be gone
        os.chdir(told.cwd)
    sys.path[:] = told.path
    torch.set_default_dtype(told.dtype)
    sys.argv = [""]
    torch.default_generator.manual_seed(told.rank)  # as in the simulator: other numbers a rank
    # Else all ranks, and all runs, would inherit one state from the server. (Without an argument
    # numpy would first import a dozen modules, in each rank.)
    np.random.seed(int.from_bytes(os.urandom(4)))
    random.seed()


def _stream(fd: int) -> Any:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    _libc.fflush(None)  # what C code printed


def _exit(goodbye: SystemExit) -> NoReturn:
    """sys.exit: end as Python would, but at once."""
    if goodbye.code is not None and not isinstance(goodbye.code, int):
        print(goodbye.code, file=sys.stderr)
    _flush()
    os._exit(goodbye.code & 0xFF if isinstance(goodbye.code, int) else int(bool(goodbye.code)))
