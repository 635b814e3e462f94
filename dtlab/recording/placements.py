"""Gradients summed on the GPUs of one machine, for each place where the servers may live."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from dtlab.comm import Comm
from dtlab.ps.gpu_placement import GPU_PLACEMENTS, gpus_and_cpu, sum_on_gpus
from dtlab.simulator import simulate
from dtlab.topology import Topology, link_bytes


class Placed(NamedTuple):
    """The cost of one placement. links: (a, b) → bytes in the busier of its two directions."""

    elapsed_s: float
    links: dict[tuple[int | str, int | str], int]

    @property
    def busiest(self) -> int:
        """The most bytes on any link, in one direction."""
        return max(self.links.values(), default=0)


class Placements(NamedTuple):
    """All placements on one machine: `runs` by their names, as in `ps.gpu_placement`.

    nbytes: of the gradients of each GPU; bandwidth_Bps: of each PCIe link, in one direction.
    """

    runs: dict[str, Placed]
    gpus: int
    nbytes: int
    bandwidth_Bps: float
    switches: int

    @property
    def cluster(self) -> Topology:
        """The machine: its last rank is the CPU."""
        return gpus_and_cpu(self.gpus, self.switches, self.bandwidth_Bps)


@lru_cache(maxsize=128)
def placements(gpus: int = 4, nbytes: int = 160_000_000, bandwidth_Bps: float = 16e9,
               switches: int = 1) -> Placements:
    """Simulate every placement; latency and addition cost nothing. The arguments are as in
    `Placements`. Raises `ConfigError` for a machine that can't be."""
    there = Placements({}, gpus, nbytes, bandwidth_Bps, switches)
    for where in GPU_PLACEMENTS:
        there.runs[where] = _placed(where, there)
    return there


def _placed(where: str, machine: Placements) -> Placed:
    def gradients(comm: Comm) -> None:
        sum_on_gpus(comm, torch.empty(machine.nbytes // 4, device="meta"), where)

    result = simulate(gradients, network=machine.cluster, echo=False)
    links: dict[tuple[int | str, int | str], int] = {}
    for (a, b), count in link_bytes(machine.cluster, result.trace).items():
        if machine.gpus not in (a, b):  # between the CPU and its memory
            pair = (a, b) if str(a) <= str(b) else (b, a)
            links[pair] = max(count, links.get(pair, 0))
    return Placed(result.elapsed_s, links)
