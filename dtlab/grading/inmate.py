"""Inside the sandbox: one rank, in a process of its own, whose every message passes the referee.

The learner's function runs here and nowhere else. Its communicator is a proxy: what it posts goes
over a pipe to the referee, which posts it in a simulation and sends back what arrived. So ranks
share no memory, bytes are counted where the learner's code can't reach, and a rank that hangs or
exits is one process to end.
"""

from __future__ import annotations

import faulthandler
import io
import linecache
import os
import pickle
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import cloudpickle
import torch

from dtlab import errors
from dtlab.comm import Comm, Recv, Send, Work
from dtlab.grading.meter import Meter
from dtlab.grading.wire import Link, dtype_name, encode, tensor_bytes, tensor_from
from dtlab.tracebacks import PACKAGE, learner_line

OUTPUT_CHARS = 2_000  # what is kept of a rank's prints, per call


def serve(link: Link) -> None:
    """Do what the referee asks, one call after the other, until it hangs up."""
    silence_files()
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda _signal, frame: _say_where(link, frame))
    while True:
        order, blobs = link.recv()
        os.chdir(order["cwd"])
        sys.path[:] = order["path"]
        for file, text in order["sources"].items():  # so that tracebacks show a cell's lines
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        _play(link, order, blobs)


def silence_files() -> None:
    """What is written below Python's own streams goes nowhere, and there is nothing to read."""
    silence = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(silence, number)


def _play(link: Link, order: dict[str, Any], blobs: list[bytes]) -> None:
    """Call the learner's function once and report what came of it."""
    printed = sys.stdout = sys.stderr = Printed()
    meter = None
    try:
        function: Callable[..., Any] = pickle.loads(blobs[0])
        given: tuple[Any, ...] = pickle.loads(blobs[1])
        harness = pickle.loads(blobs[2])
        meter = Meter(given) if order["meter"] else None
        comm = InmateComm(Connection(link, meter), order["rank"], order["size"])
        inputs = (comm, *given) if order["comm"] else given
        with meter or nullcontext():
            value = harness(function, *inputs) if harness else function(*inputs)
        out: list[bytes] = []
        report = {
            "do": "return",
            "value": encode(value, out),
            "after": encode(given, out),
            "peak": meter.peak_bytes if meter else 0,
        }
    except BaseException as error:  # SystemExit too: nothing that a learner raises ends the rank
        out, report = [], {"do": "raise", **describe_error(error)}
    report["printed"] = printed.text()
    link.send(report, *out)


def describe_error(error: BaseException) -> dict[str, str]:
    """The learner's exception, as text: class, message, and the traceback of learner's lines."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    story = traceback.TracebackException.from_exception(error)
    story.stack = traceback.StackSummary.from_list(
        [line for line in story.stack if not line.filename.startswith(PACKAGE)]
    )
    return {
        "error": type(error).__name__,
        "message": _text(error),
        "at": place(frames[-1] if frames else None),
        "traceback": _CELL_FILE.sub("your cell", "".join(story.format()))[-4000:],
    }


_CELL_FILE = re.compile(r"[^\s\"]*ipykernel_\d+/\d+\.py")


def place(frame: FrameType | None) -> str:
    """The learner's line that led to `frame`: "ring.py:17 in step", "line 3 in step" of a cell."""
    return re.sub(r"^(?:\d+\.py|<cell .*>):(\d+)", r"line \1", learner_line(frame))


def _text(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except Exception:  # a __str__ that raises
        return ""


def _say_where(link: Link, frame: FrameType | None) -> None:
    """SIGUSR1: the referee has lost patience; tell it the line, then wait for the end."""
    link.send({"do": "hang", "at": place(frame)})


class Printed(io.TextIOBase):
    """Keeps the beginning of what a rank prints and drops the rest at once."""

    def __init__(self) -> None:
        self._kept = io.StringIO()
        self._count = 0

    def write(self, text: str) -> int:
        if self._count < OUTPUT_CHARS:
            self._kept.write(text[: OUTPUT_CHARS - self._count])
        self._count += len(text)
        return len(text)

    def writable(self) -> bool:
        return True

    def text(self) -> str:
        """What was kept; a last line tells how much was not."""
        lost = self._count - OUTPUT_CHARS
        cut = f"\n… {lost:,} more characters" if lost > 0 else ""
        return self._kept.getvalue() + cut


class Connection:
    """The rank's line to the referee, shared by its communicator and all groups split from it."""

    def __init__(self, link: Link, meter: Meter | None):
        self._link, self._meter = link, meter
        self._works = 0

    def tell(self, do: str, *blobs: bytes, **details: Any) -> None:
        """Say something that needs no answer."""
        self._link.send({"do": do, **details}, *blobs)

    def ask(self, do: str, *blobs: bytes, **details: Any) -> tuple[dict[str, Any], list[bytes]]:
        """Say something and wait for the answer; raises the error that the answer names."""
        self.tell(do, *blobs, at=place(sys._getframe(1)), **details)
        answer, came = self._link.recv()
        if "error" in answer:
            family = getattr(errors, answer["error"], errors.DtlabError)
            raise family(answer["message"])
        return answer, came

    def quiet(self) -> AbstractContextManager[None]:
        """What the proxy itself allocates is not the learner's."""
        return self._meter.paused() if self._meter else nullcontext()

    def number(self) -> int:
        """A new number for a message under way."""
        self._works += 1
        return self._works


class InmateWork(Work):
    """A message under way; waiting for it is asking the referee."""

    def __init__(self, line: Connection, number: int, into: Any = None):
        self._line, self._number, self._into = line, number, into
        self._peer: int | None = None

    def wait(self) -> int:
        if self._peer is None:
            with self._line.quiet():
                self._peer = self._wait()
        return self._peer

    def _wait(self) -> int:
        answer, came = self._line.ask("wait", works=[self._number])
        deliver(self._into, came)
        self._into = None
        return int(answer["peers"][0])


def deliver(into: Any, blobs: list[bytes]) -> None:
    """Put the first of `blobs` where it was wanted; None: nothing was."""
    if isinstance(into, torch.Tensor):
        data = blobs.pop(0)
        into.detach().copy_(tensor_from(data, dtype_name(into.dtype), list(into.shape)))
    elif into is not None:
        into.append(pickle.loads(blobs.pop(0)))


class InmateComm(Comm):
    """`group` numbers this communicator among those of this rank: 0 is the whole run."""

    def __init__(self, line: Connection, rank: int, size: int, group: int = 0):
        self.rank, self.size, self.device = rank, size, torch.device("cpu")
        self._line, self._group = line, group

    def post(self, *ops: Send | Recv) -> list[Work]:
        with self._line.quiet():
            numbers = self._post(ops)
        return [
            InmateWork(self._line, number, op.x if isinstance(op, Recv) else None)
            for number, op in zip(numbers, ops, strict=True)
        ]

    def exchange(self, *ops: Send | Recv) -> None:
        """As in `Comm`, but in one word with the referee."""
        with self._line.quiet():
            self._exchange(ops)

    # Functions of their own, so that their data is gone when the meter looks again.

    def _post(self, ops: Sequence[Send | Recv]) -> list[int]:
        told, blobs = self._told(ops)
        self._line.tell("post", *blobs, **told)
        numbers: list[int] = told["works"]
        return numbers

    def _exchange(self, ops: Sequence[Send | Recv]) -> None:
        told, blobs = self._told(ops)
        _, came = self._line.ask("exchange", *blobs, **told)
        for op in ops:
            deliver(op.x if isinstance(op, Recv) else None, came)

    def _told(self, ops: Sequence[Send | Recv]) -> tuple[dict[str, Any], list[bytes]]:
        """What to tell the referee of these operations, and the data that they send."""
        check_overlap(self.rank, ops)
        blobs: list[bytes] = []
        rows = [self._described(op, blobs) for op in ops]
        works = [self._line.number() for _ in ops]
        return {"group": self._group, "label": self.label, "ops": rows, "works": works}, blobs

    def _described(self, op: Send | Recv, blobs: list[bytes]) -> list[Any]:
        """[verb, peer, [dtype, shape] of a tensor or None for an object]."""
        x, peer = op
        tensor = [dtype_name(x.dtype), list(x.shape)] if isinstance(x, torch.Tensor) else None
        if isinstance(op, Send):
            self._check_peer(peer, "send to")
            blobs.append(tensor_bytes(x) if tensor else cloudpickle.dumps(x))
            return ["send", peer, tensor]
        self._check_peer(peer, "receive from")
        if tensor is None and not isinstance(x, list):
            raise errors.ConfigError(
                f"rank {self.rank}: recv needs a tensor or a list to receive into, "
                f"not {type(x).__name__}"
            )
        return ["recv", peer, tensor]

    @contextmanager
    def compute(self, label: str, seconds: float = 0.0) -> Iterator[None]:
        with self._line.quiet():
            self._line.ask("compute", label=label, seconds=float(seconds))
        yield
        with self._line.quiet():
            self._line.ask("computed")

    def now(self) -> float:
        with self._line.quiet():
            return float(self._line.ask("now")[0]["now"])

    def _agree(self, value: Any) -> list[Any]:
        votes, _ = self._line.ask("agree", group=self._group, value=value)
        return [tuple(vote) if isinstance(vote, list) else vote for vote in votes["votes"]]

    def _subgroup(self, ranks: Sequence[int], context: int) -> Comm:
        group, _ = self._line.ask("subgroup", group=self._group, ranks=list(ranks),
                                  context=context)
        return InmateComm(self._line, group["rank"], len(ranks), group["group"])

    def _next_context(self) -> int:
        return int(self._line.ask("context", group=self._group)[0]["context"])


def check_overlap(rank: int, ops: Sequence[Send | Recv]) -> None:
    """Raise `ConfigError` if a receive would overwrite what is sent in the same breath."""
    sent = [_span(op.x) for op in ops if isinstance(op, Send) and _is_dense(op.x)]
    for op in ops:
        if isinstance(op, Recv) and _is_dense(op.x):
            first, last = _span(op.x)
            if any(first < end and begin < last for begin, end in sent):
                raise errors.ConfigError(
                    f"rank {rank}: receives into the tensor that it is sending; what arrives may "
                    f"overwrite what has not left yet, so receive into another tensor"
                )


def _is_dense(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_contiguous() and x.numel() > 0


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The addresses that a contiguous tensor covers."""
    return x.data_ptr(), x.data_ptr() + x.nbytes
