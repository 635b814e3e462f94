"""One rank in the sandbox: an untrusted process, whose every message passes the referee.

The learner's function runs here and nowhere else. Its communicator (`sandbox_comm`) sends requests
to the referee, which posts the messages in a simulation and answers with what arrived. So ranks
share no memory, bytes are counted where the learner's code can't reach, and a rank that hangs or
exits is one process to end.
"""

from __future__ import annotations

import faulthandler
import io
import linecache
import os
import pickle
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch

from dtlab.grading.absent import NotYourOwn
from dtlab.grading.frames import Blob, Frame, FrameSocket, encode
from dtlab.grading.learner_errors import describe_error
from dtlab.grading.meter import Meter
from dtlab.grading.rank_connection import RankConnection
from dtlab.grading.sandbox_comm import SandboxComm
from dtlab.processes.endpoint import ProcessEndpoint
from dtlab.processes.process_group import join_group, open_communicator, open_endpoint
from dtlab.tracebacks import PACKAGE

OUTPUT_CHARS = 2_000  # what is kept of a rank's prints, per call


def serve(sock: FrameSocket) -> None:
    """Make the calls that the referee sends, one after the other, until it closes its end."""
    connection = RankConnection(sock)
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: connection.send_places())
    while True:
        call = connection.next_call()
        if call.fields["path"]:  # set by `check`
            os.chdir(call.fields["cwd"])
            sys.path[:] = call.fields["path"]
        for file, text in call.fields["sources"].items():  # so that tracebacks show a cell's lines
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        _make_call(connection, call)


def _make_call(connection: RankConnection, call: Frame) -> None:
    """Call the learner's function once and report the result."""
    printed = sys.stdout = sys.stderr = Printed()
    requests = connection.add_stream()
    requests.attach()
    try:
        submission, ours, answers, arguments, *tensors = call.blobs
        given: tuple[Any, ...] = pickle.loads(arguments, buffers=tensors)
        # The given tensors, even if the function puts others into its lists and dictionaries.
        args_after = tuple(copy(x) if isinstance(x, (list, dict)) else x for x in given)
        harness, oracle = pickle.loads(ours), pickle.loads(answers)
        if call.fields["port"]:
            requests.ask("ready")  # from here on, the memory that this process takes counts
        function: Callable[..., Any] = pickle.loads(submission)
        connection.meter = meter = Meter(given) if call.fields["meter"] else None
        rank, size, port = (call.fields[name] for name in ("rank", "size", "port"))
        end = join_on_gloo(rank, size, port) if port else None
        comm = open_communicator("gloo", end, 0) if end else SandboxComm(connection, rank, size)
        ask = partial(oracle(rank), comm) if oracle else connection.ask_oracle
        inputs = (*[comm] * call.fields["comm"], *[ask] * call.fields["asks"], *given)
        free = port or meter or call.fields["library"]
        sys.setprofile(None if free else forbid_library)
        with meter or nullcontext():
            value = harness(function, *inputs) if harness else function(*inputs)
        sys.setprofile(None)
        blobs: list[Blob] = []
        messages = end.recorder.rows(end.start_s)[0] if end else []
        value, args_after = encode(value, blobs), encode(args_after, blobs)
        requests.tell("return", *blobs, at="", value=value, after=args_after, sent=messages,
                      peak=meter.peak_bytes if meter else 0, printed=printed.text())
    except BaseException as error:  # SystemExit too: no exception of a learner ends the process
        sys.setprofile(None)
        requests.tell("raise", **describe_error(error), printed=printed.text())


def join_on_gloo(rank: int, size: int, port: int) -> ProcessEndpoint:
    """This rank's end of connections over Gloo; the ranks meet at this port of the machine."""
    store = torch.distributed.TCPStore("127.0.0.1", port, size, rank == 0, use_libuv=False,
                                       timeout=timedelta(seconds=20))
    join_group("gloo", store, rank, size)
    return open_endpoint("cpu", 0, None, trace=True)


_FREE = tuple(os.path.join(PACKAGE, part) for part in (
    "comm.py", "errors.py", "reduction.py", "tracebacks.py", "grading", "ranks",
    os.path.join("collectives", "registry.py")))  # a collective's messages carry its name anyway
_IMPORTS = "<module>", "__getattr__"  # what `from dtlab import Send` runs


def forbid_library(frame: FrameType, event: str, _arg: Any) -> None:
    """As a profiler, for `sys.setprofile`, raise `NotYourOwn` when code outside this package calls
    a function of it, other than the communicator's."""
    file = frame.f_code.co_filename
    if event == "call" and file.startswith(PACKAGE) and not file.startswith(_FREE):
        caller, name = frame.f_back, frame.f_code.co_qualname
        if name not in _IMPORTS and caller and not caller.f_code.co_filename.startswith(PACKAGE):
            module = frame.f_globals["__name__"].removesuffix(f".{name}")
            raise NotYourOwn(f"the answer calls {module}.{name}")


class Printed(io.StringIO):
    """Keeps the beginning of what a rank prints and drops the rest at once."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def write(self, text: str) -> int:
        if self._count < OUTPUT_CHARS:
            super().write(text[:OUTPUT_CHARS - self._count])
        self._count += len(text)
        return len(text)

    def text(self) -> str:
        """Return the output that was kept; a last line says how much was not."""
        lost = self._count - OUTPUT_CHARS
        return self.getvalue() + (f"\n… {lost:,} more characters" if lost > 0 else "")
