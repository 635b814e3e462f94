"""The cost of a message on this machine: time a ping-pong, draw the line α + nβ through it; and a
burst, for what each further message costs that goes with others.

`calibrate()` does so once, and keeps the result for `algorithm="auto"`.
"""

from __future__ import annotations

import os
import platform
import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np
import torch

from dtlab.checks import check_whole
from dtlab.comm import Comm, Recv, Send
from dtlab.errors import ConfigError
from dtlab.machine import Machine, save
from dtlab.processes.run import launch

SIZES = tuple(4**k for k in range(2, 12))  # bytes: 16 B to 4 MB, evenly spaced on a log axis


class Line(NamedTuple):
    """A message of n bytes takes alpha + n·beta seconds. Chapter: 03."""

    alpha: float  # seconds per message
    beta: float  # seconds per byte

    def time_s(self, nbytes: float) -> float:
        """The predicted time of one message."""
        return self.alpha + nbytes * self.beta


def ping_pong(comm: Comm, sizes: Sequence[int], repeats: int) -> list[list[float]]:
    """Seconds of one message between ranks 0 and 1, by size and repeat: half of a round trip.

    Only rank 0's answer counts; ranks beyond 1 stand by. One round more than `repeats` is played,
    and the first left out: it fills caches and buffers. Chapter: 03.
    """
    balls = [torch.zeros(nbytes, dtype=torch.uint8, device=comm.device) for nbytes in sizes]
    times: list[list[float]] = [[] for _ in sizes]
    order = list(range(len(sizes)))
    for turn in range(repeats + 1):  # all sizes in turn: a slow moment hits one repeat of each
        random.Random(turn).shuffle(order)  # both ranks alike; no size always follows the largest
        for which in order:
            ball = balls[which]
            begun_s = comm.now()
            if comm.rank == 0:
                comm.send(ball, 1)
                comm.recv(ball, 1)
            elif comm.rank == 1:
                comm.recv(ball, 0)
                comm.send(ball, 0)
            times[which].append((comm.now() - begun_s) / 2)
    return [halves[1:] for halves in times]


def fit(sizes: Sequence[int], times: Sequence[Sequence[float]]) -> Line:
    """The line through the median times, by least squares of the *relative* errors.

    sizes: bytes. times: seconds, one or more repeats a size. With absolute errors the largest
    messages alone would draw the line, and α would be lost. Raises `ConfigError` unless there are
    two different sizes, and a positive time for each. Chapter: 03.
    """
    n = np.asarray(sizes, dtype=float)
    if len(n) != len(times) or len(np.unique(n)) < 2:
        raise ConfigError("fit needs times for at least two different sizes, a list for each size")
    t = np.array([np.median(repeats) if len(repeats) else 0.0 for repeats in times])
    if not (t > 0).all():
        raise ConfigError(f"fit needs positive times; the medians are {t.tolist()} s")
    rows = np.stack([1 / t, n / t], axis=1)  # each row says: (α + nβ) / t = 1
    (alpha, beta), *_ = np.linalg.lstsq(rows, np.ones_like(t), rcond=None)
    return Line(float(alpha), float(beta))


def measure(sizes: Sequence[int] = SIZES, repeats: int = 25) -> list[list[float]]:
    """Run `ping_pong` between two real processes of this machine, over Gloo."""
    check_whole("repeats", repeats)
    for nbytes in sizes:
        check_whole("a size in bytes", nbytes, 0)
    result = launch(ping_pong, (sizes, repeats), 2, timeout=60.0)
    halves: list[list[float]] = result.values[0]
    return halves


def reduce_s_per_byte(comm: Comm, nbytes: int = 4 << 20, repeats: int = 9) -> float:
    """γ: seconds to add one byte of float32 to another, the median of some."""
    into, x = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
    times = []
    for _ in range(repeats):
        begun_s = time.perf_counter()
        comm.accumulate_(into, x)
        times.append(time.perf_counter() - begun_s)
    return float(np.median(times)) / nbytes


def burst(comm: Comm, messages: int, repeats: int) -> list[float]:
    """Seconds until `messages` of 16 bytes, posted together by rank 0, are answered by one of
    rank 1's, which has room for all of them ready. By repeat; the first is left out. Only rank 0's
    answer counts; ranks beyond 1 stand by."""
    balls = [torch.zeros(16, dtype=torch.uint8) for _ in range(messages)]
    times = []
    for _ in range(repeats + 1):
        begun_s = comm.now()
        if comm.rank == 0:
            comm.exchange(*(Send(ball, 1) for ball in balls))
            comm.recv(balls[0], 1)
        elif comm.rank == 1:
            comm.exchange(*(Recv(ball, 0) for ball in balls))
            comm.send(balls[0], 0)
        times.append(comm.now() - begun_s)
    return times[1:]


def overhead_s(comm: Comm, repeats: int, messages: int = 32) -> float:
    """Seconds that each message after the first adds to a burst of them."""
    one, many = (float(np.median(burst(comm, count, repeats))) for count in (1, messages))
    return max(many - one, 0.0) / (messages - 1)


def calibrate(repeats: int = 25) -> Machine:
    """Measure α, β, γ and the overhead o of this machine, and keep them in the user's cache, with
    date and host.

    From then on `algorithm="auto"` chooses by them, here and in later runs; `dtlab doctor` shows
    them. Takes some seconds, best when nothing else runs. repeats: of each measurement, of which
    the median counts. See `dtlab.machine`.
    """
    check_whole("repeats", repeats)
    line = fit(SIZES, measure(SIZES, repeats))
    gamma = launch(reduce_s_per_byte, (), 1, timeout=60.0).values[0]
    overhead = launch(overhead_s, (repeats,), 2, timeout=60.0).values[0]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = Machine(
        max(line.alpha, 0.0), max(line.beta, 0.0), gamma, lanes=max((usable or 1), 1),
        date=datetime.now(UTC).isoformat(timespec="seconds"), host=platform.node(),
        overhead=overhead,
    )
    save(machine)
    return machine
