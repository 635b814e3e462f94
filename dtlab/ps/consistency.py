"""Rules that say which pulls wait for which clocks. The server's loop asks each three questions.

- `limit`: pulls of which iterations may be answered now?
- `group`: how many pushes of a key make an update (0: those of one clock, when it closes)?
- `quorum`: of n workers, how many must have passed a clock to close it?

An update averages the gradients that make it. Where a clock closes before anyone reads on (BSP and
its kin) these are the gradients of one clock; where no pull waits, each push is an update of its
own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dtlab.checks import check_whole, is_real, short
from dtlab.errors import ConfigError


class Clocks:
    """The number of iterations that each worker has ended, as one server knows it."""

    def __init__(self, workers: Iterable[int]):
        self.running = dict.fromkeys(workers, 0)  # worker → iterations, until it finishes
        self.finished: dict[int, int] = {}  # the same of workers that have finished or are lost
        self.closed = 0  # the number of clocks that have closed

    @property
    def slowest(self) -> float:
        """The least clock of all that are still at work; infinity if none is."""
        return min(self.running.values(), default=math.inf)

    @property
    def passed(self) -> int:
        """The number of workers that have passed the clock that closes next."""
        clocks = (*self.running.values(), *self.finished.values())
        return sum(clock > self.closed for clock in clocks)

    @property
    def taking_part(self) -> int:
        """The number of workers that take part in the clock that closes next: those that have left
        have passed it before."""
        return len(self.running) + sum(clock > self.closed for clock in self.finished.values())

    def tick(self, worker: int) -> None:
        """`worker` has ended an iteration."""
        self.running[worker] += 1

    def catch_up(self, worker: int) -> None:
        """`worker` starts afresh from what is there now: it skips clocks that closed without it."""
        self.running[worker] = max(self.running[worker], self.closed)

    def leave(self, worker: int) -> None:
        """`worker` has finished."""
        self.finished[worker] = self.running.pop(worker)


@dataclass(frozen=True)
class Consistency:
    """The rule of bulk-synchronous training, which the others change where they differ."""

    def group(self, workers: int) -> int:
        """Return how many pushes of a key make an update; 0: the close of a clock makes it."""
        return 0

    def quorum(self, workers: int) -> int:
        """Return how many of the `workers` that take part must have passed a clock to close it."""
        return workers

    def limit(self, clocks: Clocks) -> float:
        """Pulls of iterations up to this one may be answered; iteration c follows c clocks."""
        return clocks.closed

    def check(self, workers: int) -> None:
        """Raise `ConfigError` if the rule makes no sense for this number of workers."""


@dataclass(frozen=True)
class BSP(Consistency):
    """Bulk-synchronous parallel: everyone waits for everyone, each clock.

    A pull of iteration c returns once every worker has passed c clocks: all read the same weights,
    and the result is that of one process with the whole batch.
    Source: Valiant, A bridging model for parallel computation, CACM 1990.
    """


@dataclass(frozen=True)
class ASP(Consistency):
    """Asynchronous parallel: no pull waits; each push is an update, made as it arrives.

    Source: Dean et al., Large scale distributed deep networks (Downpour SGD), NeurIPS 2012.
    """

    def group(self, workers: int) -> int:
        return 1

    def limit(self, clocks: Clocks) -> float:
        return math.inf


@dataclass(frozen=True)
class SSP(Consistency):
    """Stale-synchronous parallel: the fastest is at most `staleness` clocks ahead of the slowest.

    A worker at clock c may read only what holds every update of clocks ≤ c − s − 1, so it waits
    until the slowest has passed c − s clocks; it may read newer updates too, and always reads its
    own. s = 0 is BSP, s = ∞ is ASP. For s ≥ 1 clocks overlap, so each push is an update.
    Source: Ho et al., More effective distributed ML via a stale synchronous parallel parameter
    server, NeurIPS 2013.
    """

    staleness: float = 0

    def __post_init__(self) -> None:
        s = self.staleness
        whole = is_real(s) and (s == math.inf or (s < 2**63 and s % 1 == 0))
        if not whole or s < 0:
            raise ConfigError(f"SSP's staleness is a number of clocks: a whole number, 0 or more, "
                              f"or math.inf, not {short(s)}")

    def group(self, workers: int) -> int:
        return 1 if self.staleness else 0

    def limit(self, clocks: Clocks) -> float:
        return clocks.slowest + self.staleness if self.staleness else clocks.closed


@dataclass(frozen=True)
class SoftSync(Consistency):
    """n-softsync: of λ workers, every ⌊λ/n⌋ gradients of a key make an update with their mean; a
    fast worker may give several of them. No pull waits.

    1-softsync gathers as many as BSP, without its barrier; λ-softsync is ASP. The mean staleness is
    about λ/⌊λ/n⌋, which is n if n divides λ: divide the step by it, with `StalenessAwareSGD`.
    Source: Zhang et al., Staleness-aware async-SGD for distributed deep learning, IJCAI 2016.
    """

    n: int = 1

    def __post_init__(self) -> None:
        check_whole("SoftSync's n", self.n, 1)

    def check(self, workers: int) -> None:
        if self.n > workers:
            raise ConfigError(f"SoftSync(n={short(self.n)}) with {workers} workers: n is 1 to "
                              f"{workers}, for an update takes ⌊workers/n⌋ gradients")

    def group(self, workers: int) -> int:
        return workers // self.n

    def limit(self, clocks: Clocks) -> float:
        return math.inf


@dataclass(frozen=True)
class BackupWorkers(Consistency):
    """Synchronous, with `extra` workers more than needed: the first N gradients of a clock make
    the update, and the others', which come too late, are dropped and counted.

    A late worker starts its next iteration at the clock that is then open.
    Source: Chen et al., Revisiting distributed synchronous SGD, ICLR workshop 2016.
    """

    extra: int = 1

    def __post_init__(self) -> None:
        check_whole("BackupWorkers' extra", self.extra, 0)

    def check(self, workers: int) -> None:
        if self.extra >= workers:
            raise ConfigError(f"BackupWorkers(extra={short(self.extra)}) with {workers} workers "
                              f"leaves none to wait for; extra is at most {workers - 1}")

    def quorum(self, workers: int) -> int:
        return max(1, workers - self.extra)


@dataclass(frozen=True)
class Quorum(Consistency):
    """Synchronous, but a clock closes once this `fraction` of the workers has passed it.

    With fraction 0.9, nine of ten; otherwise as `BackupWorkers`.
    """

    fraction: float = 0.9

    def __post_init__(self) -> None:
        f = self.fraction
        if not is_real(f) or not 0 < f <= 1:
            raise ConfigError(f"Quorum's fraction is above 0 and at most 1, not {short(f)}")

    def quorum(self, workers: int) -> int:
        return max(1, math.ceil(self.fraction * workers - 1e-9))
