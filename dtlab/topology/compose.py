"""Servers in a network: each host of one topology becomes a whole other topology."""

from __future__ import annotations

from functools import cache

import networkx as nx

from dtlab.checks import check_amount
from dtlab.errors import ConfigError
from dtlab.topology.base import Node, Topology, check_bandwidth, check_topology, check_total
from dtlab.topology.graphs import ShortestPaths, from_paths, join


def compose(server: Topology, network: Topology, nic_at: str | None = None,
            nic_latency_s: float = 0.5e-6, nic_Bps: float = 16e9) -> Topology:
    """Put a `server` in the place of each host of `network`; the GPUs of all are the ranks.

    Picture: where rank h of `network` was, stands the network card "server{h}.nic", on the same
    links as before, which are shared by all GPUs of the server. Every GPU has a link of its own to
    the card (`nic_at=None`: both hang on PCIe, and the card reads the GPU's memory by itself, as in
    GPUDirect RDMA); or else the card hangs on the server's node `nic_at`, such as "cpu" in a
    `pcie_server`. GPU g of server h is rank h·(GPUs per server) + g.

    Messages within a server take its routes, never the card; others go to the card, take the
    network's route, and enter through the other card. nic_latency_s, nic_Bps: of the links to the
    card, bytes per second, one direction (default: PCIe 3.0 x16). overhead_s is the server's, whose
    GPUs send the messages.

    >>> from dtlab.topology import nvswitch, racks
    >>> cluster = compose(nvswitch(8), racks(2, 2))
    >>> cluster.path(0, 31)
    [0, 'server0.nic', 'rack0', 'spine', 'rack1', 'server3.nic', 31]
    """
    check_topology("server", server)
    check_topology("network", network)
    check_total("ranks", server.ranks, network.ranks)
    check_amount("nic_latency_s", nic_latency_s)
    check_bandwidth("nic_Bps", nic_Bps)
    if server.changes or network.changes:
        raise ConfigError("compose servers and network first, then change the links of the whole")
    inner, outer, gpus = server.graph(), network.graph(), server.ranks
    if nic_at is not None and not (isinstance(nic_at, str) and nic_at in inner):
        known = ", ".join(node for node in inner if isinstance(node, str))
        raise ConfigError(f"nic_at must be a node of the server: {known}; not {nic_at!r}")
    if any(str(node).startswith("server") for node in outer):
        raise ConfigError(f"{network.name} is made of servers already; its hosts can't become "
                          f"servers again")

    def within(host: int, node: Node) -> Node:
        return host * gpus + node if isinstance(node, int) else f"server{host}.{node}"

    def outside(node: Node) -> Node:
        return f"server{node}.nic" if isinstance(node, int) else node

    graph = nx.relabel_nodes(outer, {node: outside(node) for node in outer})
    for host in range(network.ranks):
        graph.add_node(outside(host), kind="nic", host=host)
        for node, data in inner.nodes(data=True):
            graph.add_node(within(host, node), **data | {"host": host})
        graph.add_edges_from((within(host, a), within(host, b), data.copy())
                             for a, b, data in inner.edges(data=True))
        for node in range(gpus) if nic_at is None else [nic_at]:
            join(graph, within(host, node), outside(host), nic_latency_s, nic_Bps)

    in_server = ShortestPaths(inner)

    @cache
    def before_card(rank: int, leaves: bool) -> list[Node]:
        """The server's nodes on the way from GPU `rank` to the card, or from the card to it."""
        host, gpu = divmod(rank, gpus)
        if nic_at is None:
            return [rank]
        first, last = (gpu, nic_at) if leaves else (nic_at, gpu)
        return [within(host, node) for node in in_server.path(first, last, flow=rank)]

    @cache
    def between(src_host: int, dst_host: int) -> list[Node]:
        return [outside(node) for node in network.path(src_host, dst_host)]

    def path(src: int, dst: int) -> list[Node]:
        src_host, dst_host = src // gpus, dst // gpus
        if src_host == dst_host:
            return [within(src_host, node) for node in server.path(src % gpus, dst % gpus)]
        return [*before_card(src, True), *between(src_host, dst_host), *before_card(dst, False)]

    return from_paths(graph, f"{server.name} in {network.name}", path, server.overhead_s)
