"""Which bytes of a run crossed which links: counts, exact, whatever the time they took."""

from __future__ import annotations

from dtlab.errors import ConfigError
from dtlab.topology.base import Node, Topology
from dtlab.trace import Trace


def link_bytes(topology: Topology, trace: Trace) -> dict[tuple[Node, Node], int]:
    """How many bytes the messages of `trace` put on each link: (from, to) → bytes, one direction.

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
    check_ranks_of(topology, trace)
    crossed = [0] * len(topology.capacity_Bps)
    for (src, dst), nbytes in trace.bytes_by_pair().items():
        for link in topology.route(src, dst)[1]:
            crossed[link] += nbytes
    return {topology.ends(link): nbytes for link, nbytes in enumerate(crossed)}


def check_ranks_of(topology: Topology, trace: Trace) -> None:
    """Raise `ConfigError` unless `trace` has as many ranks as `topology`."""
    if trace.ranks != topology.ranks:
        raise ConfigError(f"the trace is of {trace.ranks} ranks, but {topology.name} has "
                          f"{topology.ranks}; give the topology that the run was simulated on")
