"""Communicators. Read this page first; every algorithm of the course is written in it.

A *communicator* numbers its ranks 0 … size−1 and carries messages between them. Two rules:

- Between one pair of ranks, messages are received in the order they were sent.
- A send may wait until its receiver is there (*rendezvous*). Code that relies on buffering is
  wrong on some machine, so it deadlocks, visibly, on ours.

Three communicators implement this page: real processes (`dtlab.processes`), the simulator
(`dtlab.simulator`) and the grader's referee. They provide the methods marked abstract; the rest is
written here, once.
"""

from __future__ import annotations

import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn, Self

import torch

from dtlab.checks import check_members, check_name, check_split, is_whole
from dtlab.errors import ConfigError
from dtlab.machine import Machine, load
from dtlab.reduction import combine_
from dtlab.tracebacks import end_at_caller


class Send(NamedTuple):
    """Send `x` (a tensor, or any object that pickles) to rank `dst`."""

    x: Any
    dst: int


class Recv(NamedTuple):
    """Receive into `x`, a tensor of the shape and dtype that was sent, or a list, to which an
    object is appended; from rank `src`, or from anyone if it is None. On one communicator, receives
    from anyone that nobody has waited for are alike, and none from a named rank is beside them.
    """

    x: Any
    src: int | None = None


class Work(ABC):
    """Something under way: a message, or a function that `Comm.begin` has begun.

    Wait for it, or cancel it: a run ends with an error that names the line which began a piece of
    work that nobody waited for.
    """

    owed = ""  # the call that ends it: an error names that, if the rank returns before

    @abstractmethod
    def wait(self) -> Any:
        """Block until it is done. Returns the peer's rank for a message that is sent, or received
        into its place; for a function, what it returned. Raises its error.

        Until then neither change what you send nor read what you receive into.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Nobody will wait for it. A receive still takes the next message for it, and fills `x`."""

    def _detach(self) -> None:
        """It goes on, and `wait` waits for it, but nobody need do so: no error names it."""


class Comm(ABC):
    """A group of ranks, seen from one of them.

    Each communicator has two contexts: one for the messages that you send and receive, one for
    those of collectives. Messages of different contexts, or of different communicators, never meet.
    """

    rank: int
    size: int
    device: torch.device
    label: str = ""  # what the messages are for: see `labelled`
    axes: tuple[str, ...] = ("ranks",)  # of a mesh, along which its ranks lie; () if unknown
    in_collective = False  # is this the communicator of one call of a collective?

    def __init__(self, rank: int, size: int, device: torch.device):
        self.rank, self.size, self.device = rank, size, device
        # Shared by all that `labelled` makes of this communicator.
        self._groups: dict[tuple[int, ...], Comm] = {}
        self._collectives: list[Comm] = []  # the communicator with the other context, once needed
        self._splits = itertools.count()

    def __deepcopy__(self, memo: object) -> Comm:
        return self  # a copied module has the same ranks

    def __reduce__(self) -> NoReturn:
        raise ConfigError(f"rank {self.rank}: no communicator can be pickled, nor a module that "
                          f"holds one; pickle tensors, such as its state_dict")

    # ---- what each communicator provides -------------------------------------------------------

    @abstractmethod
    def post(self, *ops: Send | Recv) -> list[Work]:
        """Start all of `ops` together and return at once; wait for each with `Work.wait`."""

    @abstractmethod
    def wait_any(self, works: Sequence[Work], timeout_s: float | None = None) -> Work | None:
        """Block until one of `works` is done, and return it: it counts as waited for. One that has
        failed is returned, too, and `wait` on it raises its error. None once `timeout_s` seconds
        have passed (virtual in the simulator).
        """

    @abstractmethod
    def begin(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Work:
        """Begin `fn(stream, *args, **options)` beside this rank, and return at once. `wait` returns
        what it returned, or raises what it raised.

        `stream` is a communicator over the same ranks with contexts of its own. All that is begun
        on one communicator runs in the order in which it was begun, as on a CUDA stream; so ranks
        that begin the same things in the same order always meet. After one that raised `RankDied`,
        what is begun on that communicator raises it, too.
        """

    @abstractmethod
    def compute(self, label: str, seconds: float = 0.0) -> AbstractContextManager[None]:
        """Mark the work done inside as a span of the trace.

        In the simulator it also takes `seconds` of virtual time; elsewhere it takes what it takes.
        """

    @abstractmethod
    def now(self) -> float:
        """Seconds since the run began: real, or virtual in the simulator."""

    @abstractmethod
    def _all_gather_objects(self, value: Any) -> list[Any]:
        """Everyone's `value`, by rank: free of charge, outside the trace. Set-up only."""

    @abstractmethod
    def _make_group(self, ranks: Sequence[int], context: tuple[Any, ...]) -> Comm:
        """A communicator over these of my ranks. `context` tells it from all others that are
        formed of this communicator, and is the same on all its ranks."""

    def _reduced(self, into: torch.Tensor) -> None:
        """Note that `accumulate_` has changed `into`; the simulator charges γ here."""

    @property
    def machine(self) -> Machine:
        """The expected cost of messages and additions here: `algorithm="auto"` asks."""
        return load()

    # ---- when ranks die (dtlab.run with may_die, dtlab.simulate with detect_s) -----------------

    def shrink(self) -> Comm:
        """After a death, the survivors agree who is left, and form a new communicator of them, in
        the order of their `global_ranks` (as ULFM's MPI_Comm_shrink). Launcher or simulator tell
        who lives, so that is never in doubt.

        Called on the communicator of the run, or on what `shrink` returned. It ends that one and
        all that was made of it: nothing under way arrives here any more, and ranks that wait for
        this one get `RankDied`, and should call it, too. It returns once every living rank has
        called it or has returned. Ranks that were started anew and wait by then are among them.
        """
        raise ConfigError(f"rank {self.rank}: only the communicator of a whole run can shrink, "
                          f"on CPUs: the one that your function was given")

    def joining(self) -> bool:
        """Do ranks that were started anew wait for the others' next `shrink`? Ranks that ask at
        different times may be told different things: agree before you act on it."""
        return False

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The number that each of my ranks has in the whole run."""
        return tuple(range(self.size))

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

        `x` is a tensor of the shape and dtype that was sent, else `ShapeMismatch`; or a list, to
        which a received object is appended. From anyone: `RankDied` once one has died.
        """
        source: int = self.post(Recv(x, src))[0].wait()
        return source

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

        Shapes and dtypes are equal, else `ShapeMismatch`. `op` is "sum", "prod", "max", "min",
        "avg" (a sum here; the end of the reduction divides), or a function of two tensors.
        """
        combine_(into, x, op)
        self._reduced(into)
        return into

    # ---- groups of ranks -----------------------------------------------------------------------

    def subgroup(self, ranks: Iterable[int]) -> Comm:
        """A communicator over these of my ranks, numbered in this order. Its messages are its own.

        Nobody is asked: only its ranks call this, all with the same list. Groups may overlap and
        nest. The same list gives the same communicator again; `split` gives a new one each time.
        """
        members = check_members(ranks, self.rank, self.size)
        group = self._groups.get(members)
        if group is None:
            group = self._groups[members] = self._new_group(members, ("group", *members))
        return group.labelled(self.label) if self.label else group

    def split(self, color: int | None, key: int = 0) -> Comm | None:
        """Ranks that name the same `color` form a new communicator, numbered by (key, old rank).

        Everyone must call it. `color=None` joins no group and gets None.
        """
        check_split(color, key, self.rank)
        votes = self._all_gather_objects((color, key))
        number = next(self._splits)
        if color is None:
            return None
        members = sorted((k, rank) for rank, (c, k) in enumerate(votes) if c == color)
        ranks = tuple(rank for _, rank in members)
        return self._new_group(ranks, ("split", number, *ranks))

    def _new_group(self, ranks: Sequence[int], context: tuple[Any, ...]) -> Comm:
        """`_make_group`, of which the groups within a collective are part of it."""
        group = self._make_group(ranks, context)
        group.in_collective = self.in_collective
        group.axes = ()
        return group

    def labelled(self, label: str) -> Self:
        """This communicator; its messages have a label in the trace, which both ends compare."""
        check_name(f"rank {self.rank}: a label", label)
        named = object.__new__(type(self))
        named.__dict__.update(self.__dict__)
        named.label = sys.intern(label)  # equal ones compare faster
        return named

    def collective(self, label: str) -> Comm:
        """The communicator of one call of a collective: its messages carry `label`, and meet only
        those of collectives, not what `send` sends. A broadcast that meets a reduce is named. The
        label of this communicator, if it has one, comes first.

        A collective that is called within another one goes by both names, the outer one first.
        """
        if self.in_collective:
            return self.labelled(f"{self.label} > {label}" if self.label else label)
        if not self._collectives:
            inner = self._make_group(tuple(range(self.size)), ("collective",))
            inner.in_collective = True
            self._collectives.append(inner)
        return self._collectives[0].labelled(f"{self.label}: {label}" if self.label else label)

    def _check_peer(self, peer: int | None, verb: str) -> None:
        """Raise `ConfigError` unless `peer` is another rank of this communicator."""
        if peer is None and verb == "receive from":
            return
        if not is_whole(peer):
            raise ConfigError(f"rank {self.rank}: can't {verb} rank {peer!r}; a rank is an int")
        if not 0 <= peer < self.size:
            raise ConfigError(f"rank {self.rank}: can't {verb} rank {peer}; the ranks here are 0 "
                              f"to {self.size - 1}")
        if peer == self.rank:
            raise ConfigError(f"rank {self.rank}: can't {verb} itself; keep the value instead")

    def __getattr__(self, name: str) -> Any:
        """Raise `AttributeError`, as a communicator has no `name`."""
        message = f"a communicator has no {name!r}"
        if not name.startswith("_") and hasattr(sys.modules.get("dtlab.collectives"), name):
            message += f"; collectives are functions: call dtlab.collectives.{name}(comm, …)"
        raise end_at_caller(AttributeError(message))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.size}>"
