"""algorithm="auto": the algorithm that costs least, as far as α, β and γ can tell."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from dtlab import cost
from dtlab.collectives.registry import BARE, check_tensor
from dtlab.comm import Comm
from dtlab.machine import Machine


def named(comm: Comm, collective: str, algorithm: str, x: Any = None, pieces: int = 1) -> str:
    """`algorithm`, or what "auto" stands for in this call. The same on all ranks of one host.

    The vector that the closed forms call n is `pieces` times as large as `x`.
    """
    if algorithm != "auto":
        return algorithm
    if x is None:
        return cheapest(collective, comm.size, 0, 1, comm.machine)
    check_tensor(comm, x, collective)
    return cheapest(collective, comm.size, pieces * x.nbytes, x.dtype.itemsize, comm.machine)


@lru_cache(maxsize=4096)
def cheapest(collective: str, ranks: int, nbytes: int, itemsize: int, machine: Machine) -> str:
    """The algorithm with the least predicted time; of equals, that with the shorter path, and of
    those the first in the registry."""
    def seconds(name: str) -> tuple[float, float]:
        path_s, work_s = cost.bounds_s(collective, name, ranks, nbytes, machine, itemsize)
        return max(path_s, work_s), path_s

    return min(BARE[collective], key=seconds)


