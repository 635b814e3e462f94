"""Data centres as trees: racks under a spine, and the fat tree of three levels.

Oversubscription of a switch is what may come up from below, divided by what can leave upwards:
with 4:1, hosts that all send out of their rack get a quarter of their bandwidth each.
"""

from __future__ import annotations

import networkx as nx

from dtlab.checks import check_choice, check_each, check_positive, check_whole
from dtlab.errors import ConfigError
from dtlab.topology.base import (
    OVERHEAD_S,
    Node,
    Topology,
    check_bandwidth,
    check_count,
    check_link,
    check_total,
)
from dtlab.topology.graphs import from_paths, join, pair_hash

ETHERNET_100G_BPS = 12.5e9
MOST_PORTS = 100  # of a switch of a fat tree: k³/4 hosts, k³/2 links between switches


def racks(racks: int, hosts: int, gpus: int = 1, oversubscription: float = 4.0,
          latency_s: float = 1e-6, bandwidth_Bps: float = ETHERNET_100G_BPS,
          pcie_Bps: float = 16e9, overhead_s: float = OVERHEAD_S) -> Topology:
    """Racks of hosts, each rack under a top-of-rack switch, these under one spine.

    Picture: a tree. On top the spine, below it `racks` switches, below each `hosts` hosts. With
    `gpus` > 1 a host is a PCIe switch with that many GPUs below, which are the ranks and share the
    host's network card; else the host itself is the rank. The spine stands for as many switches as
    it takes not to be a bottleneck; the link from a rack to it carries hosts · bandwidth_Bps /
    oversubscription.

    latency_s: of each link. bandwidth_Bps: of a host's network card, bytes per second, one
    direction (default: 100 Gb/s Ethernet); pcie_Bps: of each GPU's link inside the host.
    overhead_s: see `Topology`.
    Source: Kurose & Ross, Computer Networking, 8th ed., §6.6 (the shape, and why racks compete).

    >>> racks(2, 4).path(0, 7)
    [0, 'rack0', 'spine', 'rack1', 7]
    """
    check_each(check_count, racks=racks, hosts=hosts, gpus=gpus)
    check_total("GPUs", racks, hosts, gpus)
    check_positive("oversubscription", oversubscription)
    check_link(latency_s, bandwidth_Bps)
    check_bandwidth("pcie_Bps", pcie_Bps)
    graph = nx.DiGraph()
    above: dict[Node, Node] = {}  # node → the switch above it

    def hang(below: Node, switch: Node, bandwidth_Bps: float) -> None:
        above[below] = switch
        join(graph, below, switch, latency_s, bandwidth_Bps)

    graph.add_node("spine", kind="switch")
    for rack in range(racks):
        graph.add_node(f"rack{rack}", kind="switch")
        hang(f"rack{rack}", "spine", hosts * bandwidth_Bps / oversubscription)
    for host in range(racks * hosts):
        _add_host(graph, host, gpus)
        hang(host if gpus == 1 else f"host{host}", f"rack{host // hosts}", bandwidth_Bps)
        for gpu in range(host * gpus, (host + 1) * gpus if gpus > 1 else 0):
            hang(gpu, f"host{host}", pcie_Bps)

    def path(src: int, dst: int) -> list[Node]:
        up: list[Node] = [src]
        down: list[Node] = [dst]
        while up[-1] != down[-1]:  # both are at the same level, always
            up.append(above[up[-1]])
            down.append(above[down[-1]])
        return up + down[-2::-1]

    each = f"{gpus} GPUs" if gpus > 1 else f"{bandwidth_Bps / 1e9:g} GB/s"
    return from_paths(graph, f"racks({racks} × {hosts} hosts, {each}, {oversubscription:g}:1)",
                      path, overhead_s)


def fat_tree(k: int, hosts: int | None = None, oversubscription: float = 1.0,
             latency_s: float = 1e-6, bandwidth_Bps: float = ETHERNET_100G_BPS,
             overhead_s: float = OVERHEAD_S, routing: str = "hash") -> Topology:
    """The fat tree of equal switches with k ports, in three levels.

    Picture: k pods. In each pod k/2 edge switches, each with k/2 hosts below, and k/2 aggregation
    switches, each joined to all edge switches of its pod. On top (k/2)² core switches in k/2
    groups; aggregation switch a of every pod is joined to all of group a. So there are k³/4 hosts,
    (k/2)² equal paths between pods, and all hosts can send at full speed at once.

    hosts: how many; the first edge switches are filled first. Default: k³/4, all that fit.
    oversubscription: how much slower than a host's link each link between switches is. latency_s:
    of each link; bandwidth_Bps: of a host's link, bytes per second, one direction (default:
    100 Gb/s Ethernet); overhead_s: see `Topology`.
    routing: "hash": a hash of (src, dst) chooses among the equal paths, so that two flows may meet
    on one link while another is free, as on Ethernet. "d_mod_k": the destination alone chooses, its
    last digit to base k/2 the aggregation switch, the one before that the core switch; so where
    each of k³/4 hosts sends to the one s further on, no two flows meet on any link. InfiniBand's
    OpenSM routes in this way with its engine ftree. Raises `ConfigError` for any other.
    Source: Al-Fares, Loukissas, Vahdat 2008, A Scalable, Commodity Data Center Network; Zahavi
    2010, D-Mod-K routing providing non-blocking traffic for shift permutations on real life fat
    trees.

    >>> fat_tree(4)
    <Topology fat_tree(k=4, 16 hosts, 12.5 GB/s, 1:1): 16 ranks, 96 links>
    """
    check_whole("k", k, 2, MOST_PORTS)
    check_link(latency_s, bandwidth_Bps)
    if k % 2:
        raise ConfigError(f"k must be even: half of a switch's ports go up, half down; not {k}")
    k = int(k)
    half, most = k // 2, k**3 // 4
    check_count("hosts", most if hosts is None else hosts)
    count = most if hosts is None else int(hosts)
    if count > most:
        raise ConfigError(f"a fat tree of {k}-port switches has room for {most} hosts, "
                          f"not {count}; take a larger k")
    check_positive("oversubscription", oversubscription)
    check_choice("routing", routing, ("hash", "d_mod_k"))
    graph = nx.DiGraph()
    for host in range(count):
        _add_host(graph, host, 1)
        join(graph, host, f"edge{host // half}", latency_s, bandwidth_Bps)
    between_Bps = bandwidth_Bps / oversubscription
    for pod in range(k):
        for a in range(half):
            aggregation = f"aggregation{pod * half + a}"
            for i in range(half):
                join(graph, f"edge{pod * half + i}", aggregation, latency_s, between_Bps)
                join(graph, aggregation, f"core{a * half + i}", latency_s, between_Bps)
    for node in set(graph) - set(range(count)):
        graph.nodes[node]["kind"] = "switch"

    def path(src: int, dst: int) -> list[Node]:
        from_edge, to_edge = src // half, dst // half
        from_pod, to_pod = from_edge // half, to_edge // half
        if src == dst:
            return [src]
        if from_edge == to_edge:
            return [src, f"edge{from_edge}", dst]
        if routing == "hash":
            a, i = divmod(pair_hash(src, dst) % (half * half), half)
        else:
            a, i = dst % half, to_edge % half
        if from_pod == to_pod:
            middle = [f"aggregation{from_pod * half + a}"]
        else:
            middle = [f"aggregation{from_pod * half + a}", f"core{a * half + i}",
                      f"aggregation{to_pod * half + a}"]
        return [src, f"edge{from_edge}", *middle, f"edge{to_edge}", dst]

    name = (f"fat_tree(k={k}, {count} hosts, {bandwidth_Bps / 1e9:g} GB/s, "
            f"{oversubscription:g}:1{', d_mod_k' * (routing == 'd_mod_k')})")
    return from_paths(graph, name, path, overhead_s)


def _add_host(graph: nx.DiGraph, host: int, gpus: int) -> None:
    """Add a host that is a rank itself, or a PCIe switch with its GPUs, not joined to it yet."""
    if gpus == 1:
        graph.add_node(host, kind="host", host=host)
        return
    graph.add_node(f"host{host}", kind="switch")
    for gpu in range(host * gpus, (host + 1) * gpus):
        graph.add_node(gpu, kind="gpu", host=host)
