"""Cases (calls of a learner's function) and their outcomes: plain data, no behaviour."""

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
    """A learner's function, pickled, and what a process needs to unpickle it. Only sandboxed ranks
    unpickle it, never the process that judges. In `check` it may import files beside the notebook.
    """

    pickled: bytes
    path: list[str] = field(default_factory=list)  # sys.path; empty: the sandbox's own
    cwd: str = ""
    sources: dict[str, str] = field(default_factory=dict)  # file → text, of notebook cells


class _Any:
    """The type of `ANY`, a value in a `Wanted` that is not judged."""


ANY = _Any()


@dataclass(frozen=True)
class Wanted:
    """The right results of a case: lists by rank, of numbers, texts, tensors, and collections of
    them. Values that are `ANY` are not judged."""

    returns: Sequence[Any] | None = None  # what the function returns; None: not judged
    args_after: Sequence[Any] | None = None  # its arguments after the call; None: not judged
    names: tuple[str, ...] = ("x",)  # the names of these arguments
    items: tuple[str, ...] = ()  # the names of what is returned, if it is several things
    what: str = "the right result"  # for the table: "the sum"
    rtol: float = 0.0  # the largest error of floats, relative to the largest in their tensor
    least_bytes: int = 0  # these values can't have come in fewer bytes, sent by all ranks


@dataclass(frozen=True, eq=False)
class Case:
    """One call of the learner's function on every rank.

    Rank r gets the arguments `args[r]`, after its communicator. Messages cross `cluster`, or else a
    uniform network. By default a message takes one second and bandwidth is infinite, so that the
    elapsed time is the number of rounds.

    harness: a function of an exercise's module, which ranks run in the sandbox, and which calls the
    learner's function. It is for answers that are only a part of what a rank does.

    oracle: keeps in the referee what a rank must not know before it asks. The rank's function (or
    harness) gets `ask` before its other arguments. When it calls `ask(*args)`, the referee calls
    `oracle(rank)(comm, *args)` and sends the result. What the oracle does with `comm.compute` takes
    simulated time; its attribute `notes` becomes `Outcome.notes`.
    """

    tried: str  # for the table: "4 ranks, 10 × float32"
    args: list[tuple[Any, ...]]
    latency_s: float = 1.0
    bandwidth_Bps: float = math.inf
    cluster: Topology | None = None  # instead of the uniform network
    comm: bool = True  # False: the function takes no communicator
    harness: Callable[..., Any] | None = None  # ours, called as harness(function, comm, *args)
    oracle: Callable[[int], Callable[..., Any]] | None = None  # by rank, made anew for each call
    meter: bool = False  # measure the memory that the function takes
    library: bool = False  # may the function call functions of this package, such as collectives?
    clock: bool = False  # may the function read the time, and wait with a timeout? Else `now` is 0
    gloo: bool = False  # run on real processes over Gloo rather than in the simulator
    wanted: Wanted | None = None  # None: the check's judge needs none
    facts: dict[str, Any] = field(default_factory=dict)  # what the judge needs: n, dtype, …

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
    """The reason why a call gave no result. kind: "raised", "deadlock", "pending", "hung", "died",
    "limit" or "skipped"."""

    kind: str
    rank: int = -1
    error: str = ""  # the class of the exception
    message: str = ""
    at: str = ""  # the learner's line, "line 3 in step"
    details: str = ""  # a traceback, or the table of waiting ranks


@dataclass
class Outcome:
    """The result of a case. If `failure` is set, the rest means nothing."""

    values: list[Any] = field(default_factory=list)  # returned, by rank
    args_after: list[tuple[Any, ...]] = field(default_factory=list)  # the arguments, by rank
    elapsed_s: float = 0.0
    trace: Trace = field(default_factory=lambda: Trace(0))
    peak_bytes: list[int] = field(default_factory=list)  # of tensors and objects, by rank
    grown_bytes: list[int] = field(default_factory=list)  # of processes over Gloo, on Linux
    printed: list[str] = field(default_factory=list)
    objects: int = 0  # the number of messages that carried an object, not a tensor
    asked: list[int] = field(default_factory=list)  # the number of questions to the oracle, by rank
    notes: list[Any] = field(default_factory=list)  # the oracle's attribute `notes`, by rank
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
