"""Workers and their clocks, as a parameter server has seen them: what the clock picture draws."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from dtlab import ps
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.simulator import simulate
from dtlab.topology import uniform

NO_WAIT_S = 1e-3  # shorter waits are messages on their way
Pace = Callable[[int, int], float]  # (worker, from 1; iteration, from 0) → seconds of a gradient


class Iteration(NamedTuple):
    """One iteration of one worker: it asks for the weights, reads them, hands in its gradient."""

    worker: int  # its rank; rank 0 is the server
    clock: int  # under BSP and its kin, the clock that its gradient is for; else its own count
    asked_s: float
    read_s: float
    done_s: float
    staleness: int | None  # updates that its gradient had missed; None: it came too late

    @property
    def waited(self) -> bool:
        """Did it have to wait for others?"""
        return self.read_s - self.asked_s > NO_WAIT_S


@dataclass(frozen=True)
class ClockRun:
    """The work of all workers until `end_s`, in virtual time, under one rule of consistency."""

    name: str
    workers: int
    end_s: float
    slack: float  # by how many clocks a worker may be ahead of the slowest
    iterations: list[Iteration]  # in order of `asked_s`

    @property
    def ranks(self) -> range:
        """The workers."""
        return range(1, self.workers + 1)

    @cached_property
    def of(self) -> dict[int, list[Iteration]]:
        """Each worker's iterations."""
        return {w: [i for i in self.iterations if i.worker == w] for w in self.ranks}

    def current(self, worker: int, at_s: float) -> Iteration | None:
        """Return `worker`'s iteration then; None before its first iteration and after all."""
        found = [i for i in self.of[worker] if i.asked_s <= at_s]
        return found[-1] if found and at_s < found[-1].done_s else None

    def clock(self, worker: int, at_s: float) -> int:
        """Count the clocks that `worker` has behind it then."""
        ended = [i.clock + 1 for i in self.of[worker] if i.done_s <= at_s]
        now = self.current(worker, at_s)
        return max([*ended, now.clock if now else 0, 0])

    def blockers(self, waiting: Iteration, at_s: float) -> list[int]:
        """List the workers that `waiting` waits for at that time: those too far behind."""
        needed = waiting.clock - self.slack
        return [w for w in self.ranks if w != waiting.worker
                and not any(i.done_s <= at_s and i.clock + 1 >= needed for i in self.of[w])]

    def releaser(self, waited: Iteration) -> int | None:
        """The worker whose gradient ended the wait."""
        last = max((i for i in self.iterations if i.done_s <= waited.read_s),
                   key=lambda i: i.done_s, default=None)
        return last.worker if last else None

    @cached_property
    def leads(self) -> list[tuple[float, int]]:
        """Each read's time, in order, and the clocks by which it was ahead of the slowest."""
        return sorted((i.read_s, i.clock - min(self.clock(w, i.read_s) for w in self.ranks))
                      for i in self.iterations)

    def most_ahead(self, at_s: float) -> int:
        """The most clocks by which a worker that read until then was ahead of the slowest."""
        return max((lead for read_s, lead in self.leads if read_s <= at_s), default=0)

    def gradients(self, at_s: float, worker: int | None = None) -> int:
        """Gradients of a worker (None: of all) that had come in by then and counted."""
        return sum(i.done_s <= at_s and i.staleness is not None for i in self._by(worker))

    def late(self, at_s: float, worker: int | None = None) -> int:
        """Gradients that had come in by then, too late to count."""
        return sum(i.done_s <= at_s and i.staleness is None for i in self._by(worker))

    def waited_s(self, at_s: float, worker: int | None = None) -> float:
        """Seconds for which a worker, or all together, had waited by then."""
        return sum(max(0.0, min(i.read_s, at_s) - i.asked_s) for i in self._by(worker) if i.waited)

    def waiting_share(self, at_s: float) -> float:
        """The share of the workers' time, until then, in which they waited."""
        return self.waited_s(at_s) / (self.workers * at_s) if at_s > 0 else 0.0

    def _by(self, worker: int | None) -> list[Iteration]:
        return self.iterations if worker is None else self.of[worker]


@dataclass(frozen=True)
class _Watch(ps.Update):
    """A rule that changes nothing and notes what the server tells it. A gradient is the number of
    its worker's iteration, so each that counts can be recognised."""

    clocks: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    missed: dict[tuple[int, int], int] = field(default_factory=dict)
    updates: list[int] = field(default_factory=list)

    def pulled(self, w: torch.Tensor, state: ps.updates.State, worker: int) -> None:
        self.clocks[worker].append(len(self.updates))

    def prepare(self, g: torch.Tensor, w: torch.Tensor, state: ps.updates.State, worker: int,
                staleness: int) -> torch.Tensor:
        self.missed[worker, int(g)] = staleness
        return g

    def step_(self, w: torch.Tensor, g: torch.Tensor, state: ps.updates.State, count: int) -> None:
        self.updates.append(count)


def watch_clocks(consistency: ps.Consistency, pace: Pace, workers: int = 5, end_s: float = 2.0,
                 name: str = "") -> ClockRun:
    """Run `workers` under `consistency` in the simulator until each has seen `end_s`.

    pace(worker, iteration): seconds that a gradient takes, above 0; worker 1 is the first.
    A worker whose iteration is under way at `end_s` ends it. Messages take 1 µs.
    Raises `ConfigError` as `ps.join` does.
    """
    if workers < 1 or not 0 < end_s < math.inf:
        raise ConfigError(f"watch_clocks needs a worker and some time, not workers={workers}, "
                          f"end_s={end_s}")
    def body(comm: Comm) -> Any:
        """Run one node; return what the server has watched, or a worker's times."""
        watch = _Watch()
        node = ps.join(comm, consistency=consistency, update=watch)
        if node.is_server:
            node.serve()
            return watch
        node.init({"w": torch.zeros(())})
        times: list[tuple[float, float, float]] = []
        while (asked_s := comm.now()) < end_s:
            node.pull(["w"])
            read_s = comm.now()
            with comm.compute("gradient", seconds=pace(comm.rank, len(times))):
                pass
            times.append((asked_s, read_s, comm.now()))
            node.push({"w": torch.tensor(float(len(times) - 1))})
            node.clock()
        node.finish()
        return times

    network = uniform(workers + 1, 1e-6, math.inf)
    watch, *times_by_worker = simulate(body, network=network, trace=False).values
    by_clock = not consistency.group(workers)  # then as many updates as clocks are behind
    found = [Iteration(w, watch.clocks[w][k] if by_clock else k, asked_s, read_s, done_s,
                       watch.missed.get((w, k)))
             for w, times in enumerate(times_by_worker, start=1)
             for k, (asked_s, read_s, done_s) in enumerate(times)]
    slack = getattr(consistency, "staleness", 0 if by_clock else math.inf)
    return ClockRun(name or repr(consistency), workers, end_s, slack,
                    sorted(found, key=lambda i: (i.asked_s, i.worker)))


def steady(worker: int, iteration: int) -> float:
    """Everyone takes about 0.15 s, and worker 3 twice as long."""
    return (0.30 if worker == 3 else 0.15) * (1 + 0.05 * _random(worker, iteration))


def uneven(worker: int, iteration: int) -> float:
    """Everyone takes 0.08 to 0.32 s, by chance."""
    return 0.16 * math.exp2(_random(worker, iteration))


def pauses(worker: int, iteration: int) -> float:
    """Everyone takes about 0.12 s, but one time in eight another job comes first: 0.6 s."""
    chance = _random(worker, iteration)
    return 0.6 if chance > 0.75 else 0.12 * (1 + 0.1 * chance)


PACES: dict[str, Pace] = {"one slow worker": steady, "uneven": uneven, "pauses": pauses}


def _random(worker: int, iteration: int) -> float:
    """A number from −1 to 1, always the same for the same iteration."""
    return float(np.random.default_rng([7, worker, iteration]).uniform(-1, 1))
