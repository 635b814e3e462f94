"""The communicator of a sandboxed rank: whatever it is asked to do, it requests of the referee."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import cloudpickle
import torch

from dtlab import errors
from dtlab.comm import Comm, Recv, Send, Work
from dtlab.grading.frames import Frame, dtype_name, tensor_bytes, tensor_from
from dtlab.grading.learner_errors import describe_error, learner_place
from dtlab.grading.rank_connection import StreamRequests
from dtlab.machine import Machine


class SandboxWork(Work):
    """A message under way; waiting for it is a request to the referee."""

    def __init__(self, requests: StreamRequests, number: int, into: Any = None):
        self.requests, self.number, self._into = requests, number, into
        self.ended = False  # it has been waited for, or cancelled
        self._value: Any = None
        self._error: BaseException | None = None

    def wait(self) -> Any:
        if not self.ended:
            with self.requests.paused_meter():
                self._wait()
        if self._error is not None:
            raise self._error
        return self._value

    def _wait(self) -> None:
        self.ended = True
        try:
            self._take(self.requests.ask("wait", works=[self.number]))
        except errors.DtlabError as error:
            self._error = error

    def _take(self, answer: Frame) -> None:
        """It is done."""
        self._value = int(answer.fields["peers"][0])
        deliver(self._into, answer.blobs)
        self._into = None

    def cancel(self) -> None:
        if not self.ended:
            self.ended, self._into = True, None
            self.requests.tell("cancel", works=[self.number])


class BegunFunction(SandboxWork):
    """A function that `begin` has begun: it runs on a thread, once the referee says so.

    Its value and its error stay in this process.
    """

    def __init__(self, outer: StreamRequests, call: Callable[[StreamRequests], Any]):
        super().__init__(outer, next(outer.connection.numbers))
        place = learner_place(sys._getframe(1)) or outer.begun_at
        self._stream = StreamRequests(outer.connection, self.number, place)
        self._call = call
        self._stream.thread = threading.Thread(target=self._run, daemon=True)
        self._stream.thread.start()

    def _run(self) -> None:
        """On the thread."""
        stream = self._stream
        stream.answer()  # what was begun before has ended
        meter = stream.connection.meter
        try:
            with meter.on_this_thread() if meter else nullcontext():
                self._value = self._call(stream)
            stream.tell("return")
        except BaseException as error:
            self._error = error
            stream.tell("raise", **describe_error(error))

    def _take(self, answer: Frame) -> None:
        """The thread has set value or error."""


def deliver(into: Any, blobs: list[bytes]) -> None:
    """Put the first of `blobs` where it was wanted; `into` is None for a send, which has none."""
    if isinstance(into, torch.Tensor):
        data = blobs.pop(0)
        into.detach().copy_(tensor_from(data, dtype_name(into.dtype), list(into.shape)))
    elif into is not None:
        into.append(pickle.loads(blobs.pop(0)))


class SandboxComm(Comm):
    """`group` numbers this communicator among those of its stream; 0 is the stream's first."""

    def __init__(self, requests: StreamRequests, rank: int, size: int, group: int = 0):
        super().__init__(rank, size, torch.device("cpu"))
        self._requests, self._group = requests, group

    def post(self, *ops: Send | Recv) -> list[Work]:
        with self._requests.paused_meter():
            numbers = self._post(ops)
        return [
            SandboxWork(self._requests, number, op.x if isinstance(op, Recv) else None)
            for number, op in zip(numbers, ops, strict=True)
        ]

    def exchange(self, *ops: Send | Recv) -> None:
        """As in `Comm`, but in one request."""
        with self._requests.paused_meter():
            self._exchange(ops)

    # Functions of their own, so that their data is freed before the meter goes on.

    def _post(self, ops: Sequence[Send | Recv]) -> list[int]:
        fields, blobs = self._described(ops)
        self._requests.tell("post", *blobs, **fields)
        numbers: list[int] = fields["works"]
        return numbers

    def _exchange(self, ops: Sequence[Send | Recv]) -> None:
        fields, blobs = self._described(ops)
        answer = self._requests.ask("exchange", *blobs, **fields)
        for op in ops:
            deliver(op.x if isinstance(op, Recv) else None, answer.blobs)

    def _described(self, ops: Sequence[Send | Recv]) -> tuple[dict[str, Any], list[bytes]]:
        """The fields of a request for these operations, and the data that they send."""
        check_overlap(self.rank, ops)
        blobs: list[bytes] = []
        described = [self._operation(op, blobs) for op in ops]
        works = [next(self._requests.connection.numbers) for _ in ops]
        fields = {"group": self._group, "label": self.label, "ops": described, "works": works}
        return fields, blobs

    def _operation(self, op: Send | Recv, blobs: list[bytes]) -> list[Any]:
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

    def wait_any(self, works: Sequence[Work], timeout_s: float | None = None) -> Work | None:
        mine = [work for work in works if isinstance(work, SandboxWork)]
        if ended := [work for work in mine if work.ended]:
            return ended[0]
        with self._requests.paused_meter():
            answer = self._ask("wait_any", works=[w.number for w in mine], timeout_s=timeout_s)
        done = answer.fields["done"]
        return next((work for work in mine if work.number == done), None)

    def begin(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Work:
        def call(stream: StreamRequests) -> Any:
            return fn(SandboxComm(stream, self.rank, self.size), *args, **options)

        with self._requests.paused_meter():
            begun = BegunFunction(self._requests, call)
            self._ask("begin", work=begun.number)
        return begun

    @contextmanager
    def compute(self, label: str, seconds: float = 0.0) -> Iterator[None]:
        with self._requests.paused_meter():
            self._ask("compute", label=label, seconds=float(seconds))
        yield
        with self._requests.paused_meter():
            self._ask("computed")

    def now(self) -> float:
        with self._requests.paused_meter():
            return float(self._ask("now").fields["now"])

    @property
    def machine(self) -> Machine:
        alpha, beta, gamma = self._ask("machine").fields["machine"]
        return Machine(alpha, beta, gamma)

    def _agree(self, value: Any) -> list[Any]:
        votes = self._ask("agree", value=value).fields["votes"]
        return [tuple(vote) if isinstance(vote, list) else vote for vote in votes]

    def _form(self, ranks: Sequence[int], context: tuple[Any, ...]) -> Comm:
        answer = self._ask("form", ranks=list(ranks), context=list(context))
        return SandboxComm(self._requests, answer.fields["rank"], len(ranks),
                           answer.fields["group"])

    def _ask(self, kind: str, **fields: Any) -> Frame:
        return self._requests.ask(kind, group=self._group, **fields)


def check_overlap(rank: int, ops: Sequence[Send | Recv]) -> None:
    """Raise `ConfigError` if a receive would overwrite what is sent in the same batch."""
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
