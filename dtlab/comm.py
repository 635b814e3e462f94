"""What a rank can do. Read this page first; every algorithm of the course is written in it.

A *communicator* numbers its ranks 0 … size−1 and carries messages between them. Two rules:

- Between one pair of ranks, messages are received in the order they were sent.
- A send may wait until its receiver is there (*rendezvous*). Code that relies on buffering is
  wrong on some machine, so it deadlocks, visibly, on ours.

Three communicators implement this page: real processes (`dtlab.processes`), the simulator
(`dtlab.simulator`) and the grader's referee. They provide the methods marked abstract; the rest is
written here, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from numbers import Integral
from typing import Any, NamedTuple

import torch

from dtlab.errors import ConfigError
from dtlab.labels import Label
from dtlab.machine import Machine, load
from dtlab.reduction import combine_


class Send(NamedTuple):
    """Send `x` (a tensor, or any object that pickles) to rank `dst`."""

    x: Any
    dst: int


class Recv(NamedTuple):
    """Receive into `x` from rank `src`; from anyone if `src` is None.

    `x` is a tensor of the shape and dtype that was sent, or a list, to which an object is appended.
    """

    x: Any
    src: int | None = None


class Work(ABC):
    """A message under way."""

    @abstractmethod
    def wait(self) -> int:
        """Block until it is done: sent, or received into its place. Returns the peer's rank.

        Until then neither change what you send nor read what you receive into.
        """


class Comm(ABC):
    """A group of ranks, seen from one of them."""

    rank: int
    size: int
    device: torch.device
    label: str = ""  # what the messages are for: see `labelled`

    # ---- what each communicator provides -------------------------------------------------------

    @abstractmethod
    def post(self, *ops: Send | Recv) -> list[Work]:
        """Start all of `ops` together and return at once; wait for each with `Work.wait`."""

    @abstractmethod
    def compute(self, label: str, seconds: float = 0.0) -> AbstractContextManager[None]:
        """Mark the work done inside as a span of the trace.

        In the simulator it also takes `seconds` of virtual time; elsewhere it takes what it takes.
        """

    @abstractmethod
    def now(self) -> float:
        """Seconds since the run began: real, or virtual in the simulator."""

    @abstractmethod
    def _agree(self, value: Any) -> list[Any]:
        """Everyone's `value`, by rank: free of charge, outside the trace. Set-up only."""

    @abstractmethod
    def _subgroup(self, ranks: Sequence[int], context: int) -> Comm:
        """A communicator over these of my ranks; `context` keeps its messages apart from mine."""

    @abstractmethod
    def _next_context(self) -> int:
        """The smallest context number that this rank has not used yet."""

    def _reduced(self, into: torch.Tensor) -> None:
        """Called when `accumulate_` has changed `into`; the simulator charges γ here."""

    @property
    def machine(self) -> Machine:
        """What messages and additions are expected to cost here: `algorithm="auto"` asks."""
        return load()

    # ---- everything else follows from it -------------------------------------------------------

    def isend(self, x: Any, dst: int) -> Work:
        """Begin to send `x` to `dst`; the returned `Work` waits for the end of it."""
        return self.post(Send(x, dst))[0]

    def irecv(self, x: Any, src: int | None = None) -> Work:
        """Begin to receive into `x` from `src` (None: anyone)."""
        return self.post(Recv(x, src))[0]

    def send(self, x: Any, dst: int) -> None:
        """Send `x` to rank `dst`. Blocks until the message has left. Cost: α + nβ."""
        self.post(Send(x, dst))[0].wait()

    def recv(self, x: Any, src: int | None = None) -> int:
        """Receive into `x`, in place, from `src` (None: anyone). Returns the sender's rank.

        `x` is a tensor shaped like what was sent, else `ShapeMismatch`; or a list, to which a
        received object is appended.
        """
        return self.post(Recv(x, src))[0].wait()

    def recv_object(self, src: int | None = None) -> Any:
        """Receive one object (what its sender gave to `send`) and return it."""
        inbox: list[Any] = []
        self.recv(inbox, src)
        return inbox[0]

    def sendrecv(self, out: Any, dst: int, into: Any, src: int | None) -> None:
        """Send `out` to `dst` while receiving into `into` from `src`. Cost: α + nβ, not twice."""
        self.exchange(Send(out, dst), Recv(into, src))

    def exchange(self, *ops: Send | Recv) -> None:
        """Post all of `ops` together, then wait for all of them."""
        for work in self.post(*ops):
            work.wait()

    def accumulate_(self, into: torch.Tensor, x: torch.Tensor, op: Any = "sum") -> torch.Tensor:
        """into ← into op x, in place. Returns `into`. Cost: nγ.

        The one place where the course computes a reduction. `op` is "sum", "prod", "max", "min",
        "avg" (a sum here; whoever ends the reduction divides), or a function of two tensors.
        """
        combine_(into, x, op)
        self._reduced(into)
        return into

    def scratch(self, like: torch.Tensor, use: str = "inbox", rows: int = 0) -> torch.Tensor:
        """A tensor like `like` to work in (or `rows` of them, one below the other), its elements
        not set. Valid until someone asks for another one for the same `use`.

        Where fresh memory costs time, the communicator hands out the same again and again.
        """
        return like.new_empty((rows, *like.shape)) if rows else torch.empty_like(like)

    def split(self, color: int | None, key: int = 0) -> Comm | None:
        """Ranks that name the same `color` form a new communicator, numbered by (key, old rank).

        Everyone must call it. `color=None` joins no group and gets None. Messages of the new group
        never mix with messages of this one.
        """
        votes = self._agree((color, key, self._next_context()))
        if color is None:
            return None
        context = max(free for _, _, free in votes)
        members = [(k, rank) for rank, (c, k, _) in enumerate(votes) if c == color]
        return self._subgroup([rank for _, rank in sorted(members)], context)

    def labelled(self, label: str) -> AbstractContextManager[None]:
        """Messages posted inside carry `label`: in the trace, and to be compared by both ends.

        Collectives use it, so that a broadcast that meets a reduce is named, not mixed up.
        """
        return Label(self, label)

    def _check_peer(self, peer: int | None, verb: str) -> None:
        """Raise `ConfigError` unless `peer` is another rank of this communicator."""
        if peer is None and verb == "receive from":
            return
        if not isinstance(peer, Integral) or isinstance(peer, bool):
            raise ConfigError(f"rank {self.rank}: can't {verb} rank {peer!r}; a rank is an int")
        if not 0 <= peer < self.size:
            last = self.size - 1
            raise ConfigError(
                f"rank {self.rank}: can't {verb} rank {peer}; the ranks here are 0 to {last}"
            )
        if peer == self.rank:
            raise ConfigError(
                f"rank {self.rank}: can't {verb} itself; copy the tensor instead"
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.size}>"
