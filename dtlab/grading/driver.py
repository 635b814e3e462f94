"""One rank's stand-in in the simulation: it does there what the rank's process asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from dtlab.comm import Comm, Recv, Send, Work
from dtlab.errors import DtlabError
from dtlab.grading.case import Failure, Outcome
from dtlab.grading.wire import decode, tensor_bytes, tensor_from

REQUESTS_PER_RANK = 3_000  # of one call; a right answer makes a few dozen


class Aborted(Exception):
    """A rank gave no result; `outcome.failure` says why."""


class Play(Protocol):
    """What a driver needs of the case that is being played."""

    outcome: Outcome
    lines: list[str]  # where each rank was when it last asked

    def hear(self, rank: int) -> tuple[dict[str, Any], list[bytes]]:
        """What the process of `rank` says next."""

    def answer(self, rank: int, header: dict[str, Any], blobs: Sequence[bytes]) -> None:
        """Say something to the process of `rank`."""

    def fail(self, failure: Failure) -> NoReturn:
        """Give up: raises `Aborted`."""


class Sealed(NamedTuple):
    """An object on its way between two learners' processes; the referee never opens it."""

    data: bytes


class _Refused(Work):
    """A message that could not be posted."""

    def __init__(self, error: DtlabError):
        self._error = error

    def wait(self) -> int:
        raise self._error


def _operation(verb: str, peer: Any, tensor: Any, data: Iterator[bytes]) -> tuple[Any, Any]:
    """The operation that a rank asks for, and what it receives into."""
    if verb == "send":
        blob = next(data)
        return Send(Sealed(blob) if tensor is None else tensor_from(blob, *tensor), int(peer)), None
    if tensor is None:
        into: Any = []
    else:
        into = torch.empty(tensor[1], dtype=getattr(torch, tensor[0]))
    return Recv(into, peer), into


class Driver:
    """Does in the simulator what the process of one rank asks for."""

    def __init__(self, comm: Comm, play: Play):
        self.comm, self.play, self.rank = comm, play, comm.rank
        self.groups = [comm]
        self.works: dict[int, tuple[Work, Any]] = {}
        self.spans: list[AbstractContextManager[None]] = []

    def run(self) -> None:
        """Serve the process until its function returns."""
        for _ in range(REQUESTS_PER_RANK):
            said, blobs = self.play.hear(self.rank)
            try:
                if self._returned(said, blobs):
                    return
                answer = getattr(self, f"_do_{said['do']}")(said, blobs)
            except DtlabError as error:
                answer = {"error": type(error).__name__, "message": str(error)}, ()
            except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
                self.play.fail(Failure("died", self.rank, message=f"it spoke nonsense ({error})"))
            if answer is not None:
                self.play.answer(self.rank, *answer)
        self.play.fail(Failure("chatter", self.rank, at=self.play.lines[self.rank],
                               message=f"more than {REQUESTS_PER_RANK:,} operations"))

    def _returned(self, said: dict[str, Any], blobs: list[bytes]) -> bool:
        """Is this the end of the function? Notes its result, or fails with what it raised."""
        outcome, rank = self.play.outcome, self.rank
        self.play.lines[rank] = str(said.get("at") or self.play.lines[rank])
        if said["do"] in ("return", "raise"):
            outcome.printed[rank] = str(said["printed"])
        if said["do"] == "raise":
            self.play.fail(Failure("raised", rank, str(said["error"]), str(said["message"]),
                                   str(said["at"]), str(said["traceback"])))
        if said["do"] != "return":
            return False
        outcome.values[rank] = decode(said["value"], blobs)
        outcome.after[rank] = decode(said["after"], blobs)
        outcome.peak_bytes[rank] = int(said["peak"])
        return True

    # ---- what a rank may ask for; None: no answer is due ----------------------------------------

    def _do_post(self, said: dict[str, Any], blobs: list[bytes]) -> None:
        """Start messages. No answer is due: a rank learns of an error when it waits."""
        group, label = self.groups[said["group"]], str(said["label"])
        data = iter(blobs)
        for number, (verb, peer, tensor) in zip(said["works"], said["ops"], strict=True):
            op, into = _operation(verb, peer, tensor, data)
            work: Work
            try:
                with group.labelled(label):
                    work = group.post(op)[0]
            except DtlabError as error:
                work = _Refused(error)
            self.works[int(number)] = work, into

    def _do_wait(self, said: dict[str, Any], _: list[bytes]) -> Any:
        """Wait for messages; the answer brings what has arrived."""
        peers, blobs = [], []
        for number in said["works"]:
            work, into = self.works.pop(int(number))
            peers.append(work.wait())
            if isinstance(into, torch.Tensor):
                blobs.append(tensor_bytes(into))
            elif into is not None:
                blobs.append(into[0].data)
        return {"peers": peers}, blobs

    def _do_exchange(self, said: dict[str, Any], blobs: list[bytes]) -> Any:
        self._do_post(said, blobs)
        return self._do_wait(said, blobs)

    def _do_now(self, *_: Any) -> Any:
        return {"now": self.comm.now()}, ()

    def _do_compute(self, said: dict[str, Any], _: list[bytes]) -> Any:
        span = self.comm.compute(str(said["label"]), float(said["seconds"]))
        span.__enter__()
        self.spans.append(span)
        return {}, ()

    def _do_computed(self, *_: Any) -> Any:
        self.spans.pop().__exit__(None, None, None)
        return {}, ()

    def _do_agree(self, said: dict[str, Any], _: list[bytes]) -> Any:
        return {"votes": self.groups[said["group"]]._agree(said["value"])}, ()

    def _do_context(self, said: dict[str, Any], _: list[bytes]) -> Any:
        return {"context": self.groups[said["group"]]._next_context()}, ()

    def _do_subgroup(self, said: dict[str, Any], _: list[bytes]) -> Any:
        new = self.groups[said["group"]]._subgroup(said["ranks"], int(said["context"]))
        self.groups.append(new)
        return {"group": len(self.groups) - 1, "rank": new.rank}, ()
