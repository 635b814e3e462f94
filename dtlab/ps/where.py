"""Where the servers may live inside one machine of GPUs, and the cluster on which that matters."""

from __future__ import annotations

import math

import torch

from dtlab.collectives import all_reduce
from dtlab.collectives.view import View
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.ps.push_pull import push_pull
from dtlab.topology import Topology, from_graph, pcie_server
from dtlab.topology.graphs import join

PLACEMENTS = ("on GPU 0", "on the CPU", "spread over the GPUs", "in a ring, no server")


def gpus_and_cpu(gpus: int = 4, switches: int = 1, bandwidth_Bps: float = 16e9,
                 latency_s: float = 0.0) -> Topology:
    """A `pcie_server` whose CPU is a rank as well: the last one, `gpus`.

    Its memory is faster than any PCIe link, so the links between switches and CPU are what it is
    reached by. bandwidth_Bps: of each PCIe link, one direction. Raises `ConfigError` as
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
    """The ranks that serve, on `gpus_and_cpu(gpus)`; none where all-reduce does without."""
    if placement not in PLACEMENTS:
        raise ConfigError(f"no placement {placement!r}; there are: {', '.join(PLACEMENTS)}")
    everyone = list(range(gpus))
    return dict(zip(PLACEMENTS, ([0], [gpus], everyone, []), strict=True))[placement]


def aggregate(comm: Comm, x: torch.Tensor, placement: str) -> torch.Tensor:
    """In place: x becomes the sum over the GPUs, on every GPU. Returns x.

    The ranks are those of `gpus_and_cpu`: all but the last are GPUs, with a gradient x each.
    """
    gpus = range(comm.size - 1)
    servers = servers_of(placement, len(gpus))
    if servers:
        return push_pull(comm, x, servers, gpus)
    if comm.rank in gpus:
        all_reduce(View(comm, gpus), x, algorithm="ring")
    return x
