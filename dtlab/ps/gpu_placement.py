"""Placements inside one machine: its GPUs and its CPU as the ranks of a cluster."""

from __future__ import annotations

import math

import torch

from dtlab.checks import check_choice
from dtlab.collectives import all_reduce
from dtlab.comm import Comm
from dtlab.ps.placement import aggregate
from dtlab.topology import Topology, from_graph, pcie_server
from dtlab.topology.graphs import join

GPU_PLACEMENTS = ("on GPU 0", "on the CPU", "spread over the GPUs", "in a ring, no server")


def gpus_and_cpu(gpus: int = 4, switches: int = 1, bandwidth_Bps: float = 16e9,
                 latency_s: float = 0.0) -> Topology:
    """A `pcie_server` whose CPU is a rank as well: the last one, `gpus`.

    Its memory is faster than any PCIe link, so the links between switches and CPU limit what
    it receives and sends. bandwidth_Bps: of each PCIe link, one direction. Raises `ConfigError` as
    `pcie_server` does.

    >>> gpus_and_cpu(4).path(0, 4)
    [0, 'pcie0', 'cpu', 4]
    """
    graph = pcie_server(gpus, switches, latency_s, bandwidth_Bps).graph()
    graph.add_node(gpus, kind="host", host=0)
    join(graph, gpus, "cpu", 0.0, math.inf)
    name = f"{gpus} GPUs and CPU, {switches} switches, {bandwidth_Bps / 1e9:g} GB/s"
    return from_graph(graph, name)


def servers_of(placement: str, gpus: int) -> list[int]:
    """The ranks that serve, on `gpus_and_cpu(gpus)`; none where an all-reduce needs none."""
    check_choice("placement", placement, GPU_PLACEMENTS)
    return dict(zip(GPU_PLACEMENTS, ([0], [gpus], [*range(gpus)], []), strict=True))[placement]


def sum_on_gpus(comm: Comm, x: torch.Tensor, placement: str) -> torch.Tensor:
    """In place: x becomes the sum over the GPUs, on every GPU. Returns x.

    The ranks are those of `gpus_and_cpu`: all but the last are GPUs, with a gradient x each. What
    the CPU gives doesn't count. Cost: as of `aggregate` and `all_reduce`.
    """
    servers_of(placement, comm.size - 1)  # raises for what doesn't exist
    if placement == "on the CPU":
        return aggregate(comm, x, "on_cpu", server=comm.size - 1)
    if comm.rank == comm.size - 1:
        return x
    gpus = comm.subgroup(range(comm.size - 1))
    if placement == "in a ring, no server":
        return all_reduce(gpus, x, algorithm="ring")
    return aggregate(gpus, x, "on_one" if placement == "on GPU 0" else "spread")
