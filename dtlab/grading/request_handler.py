"""The referee's side of one rank's stream: carries out the process's requests in the simulator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from dtlab.comm import Comm, Recv, Send, Work
from dtlab.errors import ConfigError, DtlabError, ShapeMismatch
from dtlab.grading.case import CaseFailure
from dtlab.grading.frames import MAX_BYTES, Blob, Frame, decode, encode, tensor_bytes, tensor_from
from dtlab.grading.referee import INVALID, Pending, Referee, error_failure, record_end

Answer = tuple[dict[str, Any], Sequence[Blob]]  # fields, blobs
LABEL = 200  # characters; longer labels are cut
AGREEMENTS = 3  # of a rank in a case: they carry values that don't count as bytes sent


class PickledObject(NamedTuple):
    """An object on its way between two learners' processes; the referee never opens it."""

    data: Blob


class Refused(Work):
    """The work of a message that could not be posted: `wait` raises the error."""

    def __init__(self, error: DtlabError):
        self._error = error

    def wait(self) -> int:
        raise self._error

    def cancel(self) -> None:
        pass


class RequestHandler:
    """Carries out the requests of one stream of a rank's process. comm: the stream's communicator
    in the simulator. rank: the process's rank among all ranks."""

    def __init__(self, comm: Comm, rank: int, referee: Referee, stream: int = 0):
        self.comm, self.rank, self.stream, self.referee = comm, rank, stream, referee
        self.state = referee.ranks[rank]
        self.state.groups.append(comm)
        self.group = len(self.state.groups) - 1
        self.spans: list[AbstractContextManager[None]] = []

    def run(self) -> None:
        """Serve the stream until its function ends."""
        while True:
            request = self.referee.next_request(self.rank, self.stream)
            try:
                if request.kind in ("return", "raise"):
                    self._end(request)
                    return
                if request.kind != "oracle" and not self.referee.case.comm:
                    raise ValueError("there is no communicator here")
                answer = getattr(self, f"_do_{request.kind}")(request)
            except DtlabError as error:
                self._note_mismatch(error, request)
                answer = {"error": type(error).__name__, "message": str(error)}, ()
            except INVALID as error:
                self.referee.fail(CaseFailure("died", self.rank,
                                              message=f"it sent an invalid request ({error})"))
            if answer is not None:
                self.referee.answer(self.rank, self.stream, *answer)

    def _end(self, request: Frame) -> None:
        """Record how the stream's function ended; fail the case if it is the rank's own, and
        raised."""
        if not self.stream:
            if failure := record_end(self.referee.outcome, self.rank, request):
                self.referee.fail(failure)
        elif request.kind == "raise":
            self.state.raised[int(request.fields["work"])] = error_failure(self.rank, request)

    def _note_mismatch(self, error: DtlabError, request: Frame) -> None:
        """Note a mismatch, which fails the case even if the rank never waits for the operation."""
        if isinstance(error, ShapeMismatch):
            self.referee.mismatch = self.referee.mismatch or CaseFailure(
                "raised", self.rank, "ShapeMismatch", str(error), str(request.fields.get("at", "")))

    # ---- requests; None: no answer is due -------------------------------------------------------

    def _do_post(self, request: Frame) -> None:
        """Start messages. No answer is due: a rank learns of an error when it waits."""
        fields = request.fields
        self.referee.count(self.rank, self.stream, len(fields["ops"]) - 1)
        group = self.state.groups[fields["group"]].labelled(str(fields["label"])[:LABEL])
        blobs = iter(request.blobs)
        for number, (verb, peer, tensor) in zip(fields["works"], fields["ops"], strict=True):
            op, into = _operation(verb, peer, tensor, blobs)
            self.referee.outcome.objects += verb == "send" and tensor is None
            work: Work
            try:
                work = group.post(op)[0]
            except DtlabError as error:
                self._note_mismatch(error, request)
                work = Refused(error)
            what = (f"the send to rank {peer}" if verb == "send" else
                    f"the receive from {'anyone' if peer is None else f'rank {peer}'}")
            self.state.pending[int(number)] = Pending(work, into, what, str(fields["at"]))

    def _do_wait(self, request: Frame) -> Answer:
        """Wait for a work; the answer has what has arrived."""
        number = int(request.fields["work"])
        work, into, *_ = self.state.pending.pop(number)
        peer = work.wait()
        self.state.raised.pop(number, None)  # the process has the error, and raises it in `wait`
        if isinstance(into, torch.Tensor):
            return {"peer": peer}, [tensor_bytes(into)]
        return {"peer": peer}, [] if into is None else [into[0].data]

    def _do_wait_any(self, request: Frame) -> Answer:
        """Wait for the first of some works. The answer has its number; None: a timeout."""
        works = {number: self.state.pending[number].work for number in request.fields["works"]}
        for number, work in works.items():
            if isinstance(work, Refused):
                return {"done": number, "refused": True}, ()
        group, timeout_s = self.state.groups[request.fields["group"]], request.fields["timeout_s"]
        if timeout_s is not None and not self.referee.case.clock:
            raise ConfigError("there is no clock here, which would tell more than the bytes that "
                              "are counted: wait without timeout_s")
        done = group.wait_any(list(works.values()), timeout_s)
        first = next((number for number, work in works.items() if work is done), None)
        return {"done": first, "refused": False}, ()

    def _do_cancel(self, request: Frame) -> None:
        self.state.pending.pop(int(request.fields["work"])).work.cancel()

    def _do_begin(self, request: Frame) -> Answer:
        """Begin a function: a strand of the simulation serves its requests."""
        fields = request.fields
        stream = int(fields["on"])

        def serve(comm: Comm) -> None:
            handler = RequestHandler(comm, self.rank, self.referee, stream)
            self.referee.answer(self.rank, stream, {"group": handler.group})  # it may start
            handler.run()

        work = self.state.groups[fields["group"]].begin(serve)
        self.state.pending[int(fields["work"])] = Pending(
            work, None, "the function that begin has begun", str(fields["at"]))
        return {}, ()

    def _do_oracle(self, request: Frame) -> Answer:
        args = decode(request.fields["args"], request.blobs)
        self.referee.outcome.asked[self.rank] += 1
        try:
            value, blobs = self.state.oracle(self.comm, *args), list[Blob]()
        except DtlabError:
            raise
        except INVALID as error:  # the arguments are the learner's
            raise ConfigError(f"{type(error).__name__}: {error}") from None
        return {"value": encode(value, blobs)}, blobs

    def _do_now(self, request: Frame) -> Answer:
        return {"now": self.comm.now() if self.referee.case.clock else 0.0}, ()

    def _do_machine(self, request: Frame) -> Answer:
        machine = self.state.groups[request.fields["group"]].machine
        return {"machine": [machine.alpha, machine.beta, machine.gamma]}, ()

    def _do_compute(self, request: Frame) -> Answer:
        label, seconds = str(request.fields["label"])[:LABEL], float(request.fields["seconds"])
        span = self.comm.compute(label, seconds if self.referee.case.clock else 0.0)
        span.__enter__()
        self.spans.append(span)
        return {}, ()

    def _do_computed(self, request: Frame) -> Answer:
        self.spans.pop().__exit__(None, None, None)
        return {}, ()

    def _do_agree(self, request: Frame) -> Answer:
        group, value = self.state.groups[request.fields["group"]], request.fields["value"]
        self.state.agreements += 1
        if self.state.agreements > AGREEMENTS or not _is_small(value, group.size):
            raise ConfigError(
                f"split is not for sending: at most {AGREEMENTS} times here, with whole numbers "
                f"from {-group.size} to {group.size} as color and key; or use subgroup, which "
                f"asks no one")
        return {"votes": group._all_gather_objects(value)}, ()

    def _do_form(self, request: Frame) -> Answer:
        fields = request.fields
        old = self.state.groups[fields["group"]]
        new = old._make_group(fields["ranks"], tuple(fields["context"]))
        self.state.groups.append(new)
        return {"group": len(self.state.groups) - 1, "rank": new.rank}, ()


def _is_small(value: Any, size: int) -> bool:
    """Is it what `split` agrees on, a color and a key, neither larger than the number of ranks?"""
    numbers = value if isinstance(value, list) else [value]
    return len(numbers) <= 2 and all(
        number is None or (isinstance(number, int) and abs(number) <= size)
        for number in numbers)


def _operation(verb: str, peer: Any, tensor: Any, blobs: Iterator[Blob]) -> tuple[Any, Any]:
    """Return the operation that a rank requests, and what it receives into."""
    if verb == "send":
        blob = next(blobs)
        x = PickledObject(blob) if tensor is None else tensor_from(blob, *tensor)
        return Send(x, int(peer)), None
    into: Any = []
    if tensor is not None:
        dtype = getattr(torch, tensor[0])
        if math.prod(tensor[1]) * dtype.itemsize > MAX_BYTES:
            raise ValueError("a receive of more bytes than a frame brings")
        into = torch.empty(tensor[1], dtype=dtype)
    return Recv(into, peer), into
