"""The communicator of a sandboxed rank: each of its operations is a request to the referee."""

from __future__ import annotations

import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import cloudpickle
import torch

from dtlab import errors
from dtlab.comm import Comm, Recv, Send, Work
from dtlab.grading.frames import Blob, Frame, dtype_name, tensor_bytes, tensor_from
from dtlab.grading.learner_errors import describe_error, learner_place
from dtlab.grading.rank_connection import RankConnection, StreamRequests
from dtlab.machine import Machine
from dtlab.ranks.overlap import check_overlap, extent_of
from dtlab.reduction import check_receives


class SandboxWork(Work):
    """A message under way; waiting for it is a request to the referee."""

    def __init__(self, connection: RankConnection, number: int, into: Any = None):
        self.number = number
        self.ended = False  # it has been waited for, or cancelled
        self._connection, self._into = connection, into
        self._value: Any = None
        self.error: BaseException | None = None

    def wait(self) -> Any:
        if not self.ended:
            requests = self._connection.current()
            self.ended = True
            self._connection.under_way.pop(self.number, None)
            with requests.paused_meter():
                try:
                    self._take(requests.ask("wait", work=self.number))
                except errors.DtlabError as error:
                    self.error = error
        if self.error is not None:
            raise self.error
        return self._value

    def _take(self, answer: Frame) -> None:
        """Take what was received, and the sender's rank."""
        self._value = int(answer.fields["peer"])
        deliver(self._into, answer.blobs)
        self._into = None

    def cancel(self) -> None:
        if not self.ended:
            self.ended, self._into = True, None
            self._connection.under_way.pop(self.number, None)
            self._connection.current().tell("cancel", work=self.number)


class BegunFunction(SandboxWork):
    """A function that `begin` has begun. Its value and its error stay in this process."""

    def __init__(self, connection: RankConnection, call: Callable[[Comm], Any], at: str):
        super().__init__(connection, next(connection.numbers))
        self._call, self.at = call, at

    def run(self, requests: StreamRequests, comm: Comm) -> None:
        """Call the function, on the thread of its stream."""
        meter = self._connection.meter
        try:
            with meter.on_this_thread() if meter else nullcontext():
                self._value = self._call(comm)
            requests.tell("return", work=self.number)
        except BaseException as error:
            self.error = error
            requests.tell("raise", work=self.number, **describe_error(error))

    def _take(self, answer: Frame) -> None:
        """Do nothing: `run` has set value or error."""


class SandboxStream:
    """Runs the functions begun on one communicator, in order, on a thread of its own. comm: that
    communicator, with contexts for the stream."""

    def __init__(self, connection: RankConnection, comm: SandboxComm):
        self.comm = comm
        self.begun: deque[BegunFunction] = deque()
        self._requests = connection.add_stream()
        self.number = self._requests.number
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._requests.attach()
        while go := self._requests.answers.get():  # for the next function: the referee says when
            self.comm.group = go.fields["group"]
            function = self.begun.popleft()
            self._requests.begun_at = function.at
            function.run(self._requests, self.comm)


def deliver(into: Any, blobs: list[Blob]) -> None:
    """Put received data into a tensor or a list; None: a send, which receives nothing."""
    if isinstance(into, torch.Tensor):
        into.detach().copy_(tensor_from(blobs[0], dtype_name(into.dtype), list(into.shape)))
    elif into is not None:
        into.append(pickle.loads(blobs[0]))


class SandboxComm(Comm):
    """group: the number of this communicator among its rank's; 0 has all ranks."""

    def __init__(self, connection: RankConnection, rank: int, size: int, group: int = 0):
        super().__init__(rank, size, torch.device("cpu"))
        self.group = group
        self._connection = connection
        self._stream: SandboxStream | None = None  # of `begin`

    def post(self, *ops: Send | Recv) -> list[Work]:
        under_way = self._connection.under_way
        check_overlap(self, ops, under_way.values())
        requests = self._connection.current()
        works = [SandboxWork(self._connection, next(self._connection.numbers),
                             op.x if isinstance(op, Recv) else None) for op in ops]
        with requests.paused_meter():
            self._post(requests, ops, [work.number for work in works])
            for work, op in zip(works, ops, strict=True):
                if not self.in_collective and (extent := extent_of(op.x, isinstance(op, Recv))):
                    under_way[work.number] = extent
        return list[Work](works)

    def _post(self, requests: StreamRequests, ops: Sequence[Send | Recv], works: list[int]) -> None:
        """Post. Its copies of the data are freed on return, before the meter counts again."""
        blobs: list[Blob] = []
        described = [self._operation(op, blobs) for op in ops]
        requests.tell("post", *blobs, group=self.group, label=self.label, ops=described,
                      works=works)

    def _operation(self, op: Send | Recv, blobs: list[Blob]) -> list[Any]:
        """Return [verb, peer, [dtype, shape] of a tensor or None for an object]."""
        x, peer = op
        tensor = [dtype_name(x.dtype), list(x.shape)] if isinstance(x, torch.Tensor) else None
        if isinstance(op, Send):
            self._check_peer(peer, "send to")
            blobs.append(tensor_bytes(x) if tensor else cloudpickle.dumps(x))
            return ["send", peer, tensor]
        self._check_peer(peer, "receive from")
        check_receives(self.rank, x)
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
        answer = self._ask("wait_any", works=[w.number for w in mine], timeout_s=timeout_s)
        number = answer.fields["done"]
        done = next((work for work in mine if work.number == number), None)
        if done is not None and not answer.fields["refused"] and done.error is None:
            done.wait()
        return done

    def begin(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Work:
        if self._stream is None:
            comm = SandboxComm(self._connection, self.rank, self.size)
            comm.in_collective = self.in_collective
            self._stream = SandboxStream(self._connection, comm)
        stream, label = self._stream, self.label
        at = learner_place(sys._getframe(1)) or self._connection.current().begun_at
        begun = BegunFunction(self._connection, lambda comm: fn(
            comm.labelled(label) if label else comm, *args, **options), at)
        stream.begun.append(begun)
        self._ask("begin", work=begun.number, on=stream.number)
        return begun

    @contextmanager
    def compute(self, label: str, seconds: float = 0.0) -> Iterator[None]:
        self._ask("compute", label=label, seconds=float(seconds))
        yield
        self._ask("computed")

    def now(self) -> float:
        return float(self._ask("now").fields["now"])

    @property
    def machine(self) -> Machine:
        alpha, beta, gamma = self._ask("machine").fields["machine"]
        return Machine(alpha, beta, gamma)

    def _all_gather_objects(self, value: Any) -> list[Any]:
        votes = self._ask("agree", value=value).fields["votes"]
        return [tuple(vote) if isinstance(vote, list) else vote for vote in votes]

    def _make_group(self, ranks: Sequence[int], context: tuple[Any, ...]) -> Comm:
        answer = self._ask("form", ranks=list(ranks), context=list(context))
        return SandboxComm(self._connection, answer.fields["rank"], len(ranks),
                           answer.fields["group"])

    def _ask(self, kind: str, **fields: Any) -> Frame:
        requests = self._connection.current()
        with requests.paused_meter():
            return requests.ask(kind, group=self.group, **fields)
