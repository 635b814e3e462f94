"""Traffic on a cluster: flows that compete, and which bytes crossed which links."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dtlab.checks import check_whole
from dtlab.comm import Comm, Recv, Send
from dtlab.errors import ConfigError
from dtlab.topology.base import Node, Topology, check_pair, check_topology
from dtlab.trace import Trace, check_is_trace


def send_together(comm: Comm, flows: Mapping[tuple[int, int], int], device: str = "meta") -> float:
    """Send all `flows`, (src, dst) → bytes, at the same moment. Returns when this rank's part was
    done, in seconds (`comm.now()`).

    Before: every rank knows all flows. After: each has posted its sends and receives together, and
    waited for them. device: of the tensors; "meta" ones have no data and are for the simulator.
    Raises `ConfigError` for flows that make no sense.

    >>> from dtlab import simulate
    >>> from dtlab.topology import uniform
    >>> two_into_one = {(0, 2): 1000, (1, 2): 1000}
    >>> simulate(send_together, two_into_one, network=uniform(3, 0.0, 1000.0)).elapsed_s
    2.0
    """
    if not isinstance(flows, Mapping):
        raise ConfigError(f"flows is a dict of (src, dst) → bytes, not {flows!r:.60}")
    for pair, nbytes in flows.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigError(f"a flow goes from one rank to another, (src, dst), not {pair!r:.60}")
        check_pair(*pair, comm.size)
        check_whole(f"the bytes of flow {pair}", nbytes, 0)

    def payload(nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    comm.exchange(*[Send(payload(n), dst) for (src, dst), n in flows.items() if src == comm.rank],
                  *[Recv(payload(n), src) for (src, dst), n in flows.items() if dst == comm.rank])
    return comm.now()


def link_bytes(topology: Topology, trace: Trace) -> dict[tuple[Node, Node], int]:
    """Count the bytes of `trace` on each link: (from, to) → bytes, one direction.

    All links are there, also those that carried nothing. The trace may be simulated or measured:
    of a measured one, this says what its messages would put on the links of `topology`, rank r of
    the run being rank r of the cluster. Traffic of others (`with_traffic`) is not counted. Raises
    `ConfigError` if the two have different numbers of ranks.

    >>> from dtlab.topology import racks
    >>> trace = Trace(4, [(0, 3, 100, 0, 0, 0, 1, ""), (1, 0, 7, 0, 0, 0, 1, "")])
    >>> crossed = link_bytes(racks(2, 2), trace)
    >>> crossed["rack0", "spine"], crossed["spine", "rack1"], crossed["rack0", 0]
    (100, 100, 7)
    """
    check_trace(topology, trace)
    crossed = [0] * len(topology.capacity_Bps)
    for (src, dst), nbytes in trace.bytes_by_pair().items():
        for link in topology.route(src, dst)[1]:
            crossed[link] += nbytes
    return {topology.ends(link): nbytes for link, nbytes in enumerate(crossed)}


def check_trace(topology: Topology, trace: Trace) -> None:
    """Raise `ConfigError` unless `trace` has as many ranks as `topology`."""
    check_topology("topology", topology)
    check_is_trace(trace)
    if trace.ranks != topology.ranks:
        raise ConfigError(f"the trace is of {trace.ranks} ranks, but {topology.name} has "
                          f"{topology.ranks}; give the topology that the run was simulated on")
