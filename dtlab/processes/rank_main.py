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
from dtlab.processes.endpoint import ProcessEndpoint, Reply
from dtlab.processes.forking import die_with_parent
from dtlab.processes.process_group import join_group, open_communicator, open_endpoint, open_late
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
    """Run a rank until the launcher closes its channel. Ends the process."""
    die_with_parent()
    os.setpgid(0, 0)  # so that what the rank starts can be stopped with it
    control = ControlChannel(sock)
    with contextlib.suppress(ChannelClosed, OSError):  # the launcher has closed its end, or is gone
        Rank(control, *control.recv()).serve()
    _flush()
    os._exit(0)


class Rank:
    """The child's side of `dtlab.processes.launcher.RankGroup`."""

    def __init__(self, control: ControlChannel, settings: Settings, fds: list[int]):
        self._control, self._settings, self._pid = control, settings, os.getpid()
        output, diagnosis, status, store = fds
        _set_up_process(settings, output, diagnosis)
        self._status = SharedStatus(status, settings.size)
        os.close(status)
        self._store = RankStore(ControlChannel(socket.socket(fileno=store)))
        self._namespace: dict[str, Any] = {"__name__": "__main__"}
        self._endpoint: ProcessEndpoint | None = None
        self._comm: ProcessComm | None = None
        self._run_number = -1

    def serve(self) -> None:
        """Do what the launcher asks, until it closes its end (`ChannelClosed`)."""
        while True:
            (what, run_number), fds = self._control.recv()
            try:
                comm = self._communicator(run_number)
                work = self._call(fds[0], comm) if what == "call" else self._execute(fds[0], comm)
                comm.endpoint.writer.does(RUNNING)
                self._control.send(("ready", os.getpid()))
                (word, start_s, *how), _ = self._control.recv()
                if word == "stop":  # another rank could not get ready
                    self._control.send(("stopped",))
                    continue
                comm.endpoint.begin_run(start_s)
                comm.endpoint.may_die, comm.endpoint.in_session = how
                value = work()
                if os.getpid() != self._pid:  # a child that `work` forked: its parent answers
                    raise SystemExit
                comm.endpoint.end_run()
                file = self._pack(value, comm)
            except SystemExit as error:
                _exit(error)
            except ChannelClosed:
                raise
            except BaseException as error:
                if os.getpid() != self._pid:
                    traceback.print_exception(error)
                    _exit(SystemExit(1))
                self._set_status(RAISED)
                _flush()
                self._control.send(("raised", time.perf_counter(), failures.capture(error)))
                continue
            self._set_status(RETURNED)
            self._control.send(("returned",), [file])
            os.close(file)

    def _set_status(self, doing: int) -> None:
        if self._endpoint is not None:
            self._endpoint.writer.does(doing)

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
            rows = comm.endpoint.recorder.rows(comm.endpoint.start_s)
            return serialization.pack(Reply(done_s, value, *rows))

    # ---- the group ------------------------------------------------------------------------------

    def _communicator(self, run_number: int) -> ProcessComm:
        """The communicator of all ranks: a new one for each `run_number`."""
        if self._endpoint is None and self._settings.new:
            settings = self._settings
            self._status.clear_rank(settings.rank)
            self._endpoint, self._comm = open_late(settings.device, settings.rank, settings.size,
                                                   self._status, settings.trace, self._store)
            self._run_number = run_number
        if self._endpoint is None:
            self._endpoint = self._connect()
        if self._comm is None or run_number != self._run_number:
            self._endpoint.forget_contexts()
            self._comm = open_communicator(self._settings.backend, self._endpoint, run_number)
            self._run_number = run_number
        return self._comm

    def _connect(self) -> ProcessEndpoint:
        settings = self._settings
        self._status.write(settings.rank, 0, 0, STARTING)
        connections = Connections()
        with connections:
            join_group(settings.backend, self._store, settings.rank, settings.size)
        return open_endpoint(settings.device, settings.rank, self._status, settings.trace,
                             self._store, connections)


def _set_up_process(settings: Settings, output: int, diagnosis: int) -> None:
    """Give this process the settings of the caller of `run`; its output goes to the launcher."""
    for target in (1, 2):
        os.dup2(output, target)
    os.close(output)
    sys.stdout = sys.__stdout__ = _stream(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2)  # type: ignore[misc]
    faulthandler.enable(file=2)  # a crash in C says where
    faulthandler.register(signal.SIGUSR1, file=diagnosis, all_threads=False)
    threads = dict.fromkeys(THREAD_VARIABLES, str(settings.threads))
    env = _NO_FLIGHT_RECORDER | settings.env | threads | _GLOO | _NO_DISPLAY
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    os.environ.update(env.items() - os.environ.items())
    if settings.threads != torch.get_num_threads():
        torch.set_num_threads(settings.threads)
    with contextlib.suppress(OSError):  # the caller's folder may be gone
        os.chdir(settings.cwd)
    sys.path[:] = settings.path
    torch.set_default_dtype(settings.dtype)
    sys.argv = [""]
    torch.default_generator.manual_seed(settings.rank)  # as in the simulator: other numbers a rank
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


def _exit(error: SystemExit) -> NoReturn:
    """End the process with the exit code that Python gives `error`."""
    code = error.code
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    _flush()
    os._exit(code & 0xFF if isinstance(code, int) else int(bool(code)))
