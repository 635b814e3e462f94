"""The cases that the referee tries, and their outcomes: plain data, no behaviour."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtlab.topology import Topology, uniform
from dtlab.trace import Trace


@dataclass(frozen=True)
class Submission:
    """A learner's function, pickled, and what a process needs to open it. Only the sandboxed ranks
    open it, never the process that judges it. At home it may import what lies beside it."""

    pickled: bytes
    path: list[str] = field(default_factory=list)  # sys.path; empty: the sandbox's own
    cwd: str = ""
    sources: dict[str, str] = field(default_factory=dict)  # file → text, of notebook cells


class _Any:
    """Stands in a `Wanted` for what is not judged."""


ANY = _Any()


@dataclass(frozen=True)
class Wanted:
    """An oracle's answer to a case: lists by rank, of numbers, texts, tensors, and collections of
    them. Values that are `ANY` are not judged."""

    returns: Sequence[Any] | None = None  # what the function returns; None: not judged
    leaves: Sequence[Any] | None = None  # its arguments afterwards, a tuple; None: not judged
    names: tuple[str, ...] = ("x",)  # of these arguments
    items: tuple[str, ...] = ()  # names of what is returned, if it is several things
    what: str = "the right result"  # for the table: "the sum"
    rtol: float = 0.0  # up to which floats are equal, relative to the largest of their tensor
    least_bytes: int = 0  # fewer, sent by all ranks, can't have brought these values


@dataclass(frozen=True, eq=False)
class Case:
    """One call of the learner's function on every rank.

    `args[r]` is what rank r is given, after its communicator. Messages cross `cluster`, or else a
    uniform network; with one second a message and no limit of bandwidth, the elapsed time counts
    the rounds.

    With a `harness`, a function of a module of ours, the ranks run that, in the sandbox, and it
    calls the learner's function: for functions that are only a part of what a rank does.

    With an `oracle`, what a function must not have before it asks for it stays in the referee: the
    function, or the harness, gets `ask` before its other arguments. Where it calls `ask(*args)`,
    the referee calls `oracle(rank)(comm, *args)`; so the time of `comm.compute` there is judged,
    and what it notes of them.
    """

    tried: str  # for the table: "4 ranks, 10 × float32"
    args: list[tuple[Any, ...]]
    latency_s: float = 1.0
    bandwidth_Bps: float = math.inf
    cluster: Topology | None = None  # instead of the uniform network
    comm: bool = True  # False: the function takes no communicator
    harness: Callable[..., Any] | None = None  # ours, called as harness(function, comm, *args)
    oracle: Callable[[int], Callable[..., Any]] | None = None  # by rank, made anew for each call
    meter: bool = False  # measure the memory it takes
    library: bool = False  # may the function call others of this package, such as collectives?
    clock: bool = False  # may it read the time, and wait for a limited time? Else `now` stays 0
    gloo: bool = False  # on real processes over Gloo rather than in the simulator
    wanted: Wanted | None = None  # None: the check's judge needs none
    facts: dict[str, Any] = field(default_factory=dict)  # for the check: n, dtype, …

    @property
    def ranks(self) -> int:
        """The number of ranks that take part."""
        return len(self.args)

    @property
    def network(self) -> Topology:
        """The topology that its messages cross."""
        return self.cluster or uniform(self.ranks, self.latency_s, self.bandwidth_Bps)


@dataclass(frozen=True)
class CaseFailure:
    """The reason why a call gave no result.

    kind: "raised", "deadlock", "pending", "hung", "died", "limit" or "skipped".
    """

    kind: str
    rank: int = -1
    error: str = ""  # the class of the exception
    message: str = ""
    at: str = ""  # the learner's line
    details: str = ""  # a traceback, or the table of waiting ranks


@dataclass
class Outcome:
    """The result of a case. If `failure` is set, the rest means nothing."""

    values: list[Any] = field(default_factory=list)  # returned, by rank
    after: list[tuple[Any, ...]] = field(default_factory=list)  # the arguments afterwards, by rank
    elapsed_s: float = 0.0
    trace: Trace = field(default_factory=lambda: Trace(0))
    peak_bytes: list[int] = field(default_factory=list)  # of tensors and objects, by rank
    grown_bytes: list[int] = field(default_factory=list)  # the processes, over Gloo, on Linux
    printed: list[str] = field(default_factory=list)
    objects: int = 0  # how many messages carried an object, not a tensor
    asked: list[int] = field(default_factory=list)  # how often the oracle answered, by rank
    notes: list[Any] = field(default_factory=list)  # what the oracle calls its `notes`, by rank
    failure: CaseFailure | None = None

    def printed_by(self, rank: int) -> str:
        """Return what this rank has printed, as far as it is known."""
        return self.printed[rank] if rank < len(self.printed) else ""


def counted(count: float, noun: str) -> str:
    """Format a number of things for the table.

    >>> counted(1, "round"), counted(1500, "round")
    ('1 round', '1,500 rounds')
    """
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun}{'s' * (count != 1)}"


def describe_case(ranks: int, shape: int | tuple[int, ...] | None = None,
                  dtype: torch.dtype | None = None) -> str:
    """Describe a case for the table.

    >>> describe_case(4, (2, 3), torch.float32)
    '4 ranks, 2×3 × float32'
    """
    text = counted(ranks, "rank")
    if shape is not None:
        sizes = shape if isinstance(shape, tuple) else (shape,)
        text += f", {'×'.join(map(str, sizes))} × {str(dtype).split('.')[-1]}"
    return text
