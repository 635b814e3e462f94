"""Inside one server: GPUs joined by PCIe and NVLink.

Latencies are those of the hardware: what a message loses on wires and in switches. Software adds
its own, some microseconds a message; a measured α holds both.
"""

from __future__ import annotations

import networkx as nx

from dtlab.checks import check_amount, check_choice, check_each
from dtlab.errors import ConfigError
from dtlab.topology.base import OVERHEAD_S, Node, Topology, check_bandwidth, check_count, check_link
from dtlab.topology.graphs import ShortestPaths, from_paths, join

NVLINK2_BPS = 25e9  # one NVLink 2.0 or 3.0, one direction
# The DGX-1V's NVLinks: (GPU, GPU) → links side by side. The double ones form a ring of all eight
# GPUs, 0-3-2-1-5-6-7-4, and so do the single ones, 0-1-3-7-5-4-6-2.
V100_LINKS = {
    (0, 3): 2, (2, 3): 2, (1, 2): 2, (1, 5): 2, (5, 6): 2, (6, 7): 2, (4, 7): 2, (0, 4): 2,
    (0, 1): 1, (1, 3): 1, (3, 7): 1, (5, 7): 1, (4, 5): 1, (4, 6): 1, (2, 6): 1, (0, 2): 1,
}
# Where they stand in a picture: two squares, side by side, the CPUs below.
_V100_PLACES = {
    3: (0, 3), 0: (1, 3), 4: (2, 3), 7: (3, 3), 2: (0, 2), 1: (1, 2), 5: (2, 2), 6: (3, 2),
    "pcie1": (0.3, 1), "pcie0": (0.8, 1), "pcie2": (2.2, 1), "pcie3": (2.7, 1),
    "cpu0": (0.5, 0), "cpu1": (2.5, 0),
}


def pcie_server(gpus: int = 4, switches: int = 2, latency_s: float = 0.5e-6,
                bandwidth_Bps: float = 16e9, overhead_s: float = OVERHEAD_S) -> Topology:
    """GPUs under PCIe switches, the switches under the CPU.

    Picture: a tree. On top the CPU, below it `switches` PCIe switches, below each as many GPUs as
    the others have. GPUs of one switch talk through it alone; all others share the one uplink of
    their switch to the CPU, and the other's downlink.

    latency_s, bandwidth_Bps: of each link, one direction. Defaults: PCIe 3.0 x16 (8 GT/s · 16
    lanes · 128/130 = 15.75 GB/s before headers). overhead_s: see `Topology`.
    Source: PCI Express Base Specification 3.0.
    Raises `ConfigError` unless `switches` divides `gpus`.

    >>> pcie_server().path(0, 3)
    [0, 'pcie0', 'cpu', 'pcie1', 3]
    """
    check_each(check_count, gpus=gpus, switches=switches)
    check_link(latency_s, bandwidth_Bps)
    if gpus % switches:
        raise ConfigError(f"{gpus} GPUs can't be shared equally by {switches} switches; "
                          f"choose a number of switches that divides {gpus}")
    graph = _gpus(gpus)
    graph.add_node("cpu", kind="cpu")
    for switch in range(switches):
        graph.add_node(f"pcie{switch}", kind="switch")
        join(graph, f"pcie{switch}", "cpu", latency_s, bandwidth_Bps)
    each = gpus // switches
    for gpu in range(gpus):
        join(graph, gpu, f"pcie{gpu // each}", latency_s, bandwidth_Bps)
    name = f"pcie_server({gpus} GPUs, {switches} switches, {bandwidth_Bps / 1e9:g} GB/s)"
    return from_paths(graph, name, ShortestPaths(graph).path, overhead_s)


def v100_nvlink(detour: str = "gpu", latency_s: float = 0.7e-6,
                link_Bps: float = NVLINK2_BPS, pcie_Bps: float = 16e9,
                sockets_Bps: float = 19.2e9, overhead_s: float = OVERHEAD_S) -> Topology:
    """The DGX-1V: eight V100 GPUs in a hybrid cube mesh of NVLinks.

    Picture: two squares of four GPUs, 0–3 and 4–7, each with its diagonals; every GPU is joined to
    its counterpart in the other square (0–4, 1–5, 2–6, 3–7). Each GPU has six NVLinks to four
    neighbours, two of them by a pair of links, which here are one link of twice the bandwidth.
    Below, GPUs share PCIe switches in pairs; two switches hang on each of two CPUs.

    detour: how two GPUs without an NVLink, such as 0 and 5, talk. "gpu": through a GPU that both
    have a link to, as NCCL does (its path type NVB), for even a shared NVLink is faster than PCIe.
    "pcie": through PCIe switches and CPUs, as a plain copy between such GPUs does, for the hardware
    forwards nothing between NVLinks by itself: that takes a kernel on the GPU in between.

    latency_s: of each link. link_Bps: of one NVLink; pcie_Bps: of PCIe 3.0 x16; sockets_Bps: of the
    QPI between the CPUs (9.6 GT/s · 2 B); all in bytes per second, one direction. overhead_s: see
    `Topology`.
    Source: NVIDIA, DGX-1 With Tesla V100 System Architecture (white paper, 2017); the counts of
    links are those that NCCL detects on such a server.

    >>> v100_nvlink().path(0, 4), v100_nvlink("pcie").path(0, 5)
    ([0, 4], [0, 'pcie0', 'cpu0', 'cpu1', 'pcie2', 5])
    """
    check_choice("detour", detour, ("gpu", "pcie"))
    check_amount("latency_s", latency_s)
    check_each(check_bandwidth, link_Bps=link_Bps, pcie_Bps=pcie_Bps, sockets_Bps=sockets_Bps)
    graph = _gpus(8)
    for (a, b), links in V100_LINKS.items():
        join(graph, a, b, latency_s, links * link_Bps)
    over_nvlink = ShortestPaths(graph.copy())
    below = _gpus(8)
    for cpu in range(2):
        below.add_node(f"cpu{cpu}", kind="cpu")
    join(below, "cpu0", "cpu1", latency_s, sockets_Bps)
    for switch in range(4):
        below.add_node(f"pcie{switch}", kind="switch")
        join(below, f"pcie{switch}", f"cpu{switch // 2}", latency_s, pcie_Bps)
    for gpu in range(8):
        join(below, gpu, f"pcie{gpu // 2}", latency_s, pcie_Bps)
    over_pcie = ShortestPaths(below)
    both = nx.compose(graph, below)
    nx.set_node_attributes(both, _V100_PLACES, "pos")

    def path(src: int, dst: int) -> list[Node]:
        if src == dst or detour == "gpu" or both.has_edge(src, dst):
            return over_nvlink.path(src, dst)
        return over_pcie.path(src, dst)

    through = "a neighbour GPU" if detour == "gpu" else "PCIe"
    return from_paths(both, f"v100_nvlink(8 GPUs, detours through {through})", path,
                      overhead_s)


def nvswitch(gpus: int = 8, latency_s: float = 0.5e-6, bandwidth_Bps: float = 300e9,
             overhead_s: float = OVERHEAD_S) -> Topology:
    """GPUs on an NVSwitch: each reaches every other at full speed.

    Picture: a star. In the middle the NVSwitches, which act as one crossbar that is never the
    bottleneck; around it the GPUs, each with all its NVLinks bundled into one link.

    latency_s: of each link; two make a route. bandwidth_Bps: of a GPU, bytes per second, one
    direction. Defaults: DGX A100, 12 NVLinks of 25 GB/s; 150e9 for V100 (DGX-2), 450e9 for H100.
    overhead_s: see `Topology`.
    Source: NVIDIA, DGX A100 System Architecture (white paper, 2020).

    >>> nvswitch(4).path(0, 3)
    [0, 'nvswitch', 3]
    """
    check_count("gpus", gpus)
    check_link(latency_s, bandwidth_Bps)
    graph = _gpus(gpus)
    graph.add_node("nvswitch", kind="switch")
    for gpu in range(gpus):
        join(graph, gpu, "nvswitch", latency_s, bandwidth_Bps)

    def path(src: int, dst: int) -> list[Node]:
        return [src] if src == dst else [src, "nvswitch", dst]

    return from_paths(graph, f"nvswitch({gpus} GPUs, {bandwidth_Bps / 1e9:g} GB/s)", path,
                      overhead_s)


def _gpus(count: int) -> nx.DiGraph:
    """The GPUs of one server, nothing between them yet."""
    graph = nx.DiGraph()
    for gpu in range(int(count)):
        graph.add_node(gpu, kind="gpu", host=0)
    return graph
