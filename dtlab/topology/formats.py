"""Topologies as other tools write them: the output of `nvidia-smi topo -m`, NCCL's topology file
(NCCL_TOPO_DUMP_FILE), and a network file of ASTRA-sim 2.

The first two describe one box. None of them says all that a simulation needs; what is taken from
data sheets, and what is left out, `load` says in one line on stderr.
"""

from __future__ import annotations

import math
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import networkx as nx
import yaml

from dtlab.checks import check_choice
from dtlab.errors import ConfigError
from dtlab.topology.base import MOST_NODES, Node, Topology
from dtlab.topology.graphs import ShortestPaths, from_graph, from_paths, join

PCIE_LATENCY_S, NVLINK_LATENCY_S = 0.5e-6, 0.7e-6  # of a link: as in `servers`
NVLINK_BPS = 25e9  # one NVLink 2.0 to 4.0, one direction (NVIDIA, white papers of V100, A100, H100)
_NVLINK_BPS_FROM_SM = ((0, 20e9), (70, NVLINK_BPS), (100, 50e9))  # (P100; …; B200)
_MOST_LINKS = 1_000_000
MOST_NVLINKS = 18  # of one GPU (H100, B200)
PCIE4_BPS = 31.5e9  # ×16: 16 GT/s · 16 lanes · 128/130 (PCI Express Base Specification 4.0)
SOCKETS_BPS = 19.2e9  # between two CPUs: as in `servers.v100_nvlink`
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_WRITE = "write the cluster in dtlab's own YAML (help(dtlab.topology.load) shows how)"
_FOREIGN = (  # what begins so is … and is not read
    (r"<platform\b", "a platform of SimGrid"),
    (r"<topology\b[^>]*>\s*(<!--.*?-->\s*)*<(object|info)\b", "a topology of hwloc (lstopo)"),
    (r"(?im)^\s*(SwitchName|BlockName|TreeName)\s*=", "Slurm's topology.conf, which names hosts "
     "and switches but no bandwidth"),
    (r"<graphs\b", "a graph that NCCL has chosen; its topology is what NCCL_TOPO_DUMP_FILE names"),
    (r"\{\s*\"logical-dims\"", "a logical topology of ASTRA-sim, which has no links"),
    (r"\d+ \d+ \d+\n[\d ]*\n\d+ \d+ [\d.]+[A-Z]bps\b", "a network of ns-3"),
    (r"(?im)ROCm System Management Interface", "the output of rocm-smi"),
)


def recognized(text: str, path: Path) -> Topology | None:
    """The topology that another tool has written as `text`; None if it is none of theirs. Raises
    `ConfigError` for formats that are known and not read."""
    plain = _ANSI.sub("", text)
    body = re.sub(r"^\s*(<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|\s)*", "", plain, flags=re.DOTALL)
    for pattern, what in _FOREIGN:
        if re.search(pattern, body) if "?im" in pattern else re.match(pattern, body, re.DOTALL):
            raise ConfigError(f"{path} is {what}; {_WRITE}")
    try:
        if re.match(r"<system\b", body):
            return _nccl(body, path)
        if body.startswith("<"):
            raise ConfigError(f"this XML is no topology of NCCL, which begins with <system>; "
                              f"{_WRITE}")
        if re.search(r"^\s*GPU0\s+X(\s|$)", plain, re.MULTILINE):
            return _nvidia_smi(plain, path)
        if re.search(r"(?:^|[{,])\s*[\"']?npus_count[\"']?\s*:", plain, re.MULTILINE):
            return _astra_sim(plain, path)
        if "topologies-per-dim" in plain:
            raise ConfigError("this is a network of ASTRA-sim 1; write topology:, npus_count:, "
                              "bandwidth: and latency:, as for ASTRA-sim 2")
    except (ConfigError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return None


def notice(path: Path, text: str) -> None:
    """Say, once for a file, what it does not say or the model does not take."""
    print(f"{path}: {text}", file=sys.stderr)


def _finished(graph: nx.DiGraph, path: Path, name: str, ignored: Iterable[str],
              assumed: str) -> Topology:
    topology = from_graph(graph, f"{path.stem} ({name})")  # which checks the graph
    nvlinks = graph.edge_subgraph([edge for edge in graph.edges if all(
        node == "nvswitch" or isinstance(node, int) for node in edge)]).copy()
    if name != "ASTRA-sim" and nvlinks:
        topology = from_paths(graph, topology.name, _paths_of_a_box(graph, nvlinks))
    ignored = [*dict.fromkeys(ignored)]
    notice(path, assumed + (f"; ignored: {', '.join(ignored)}" if ignored else ""))
    return topology


def _paths_of_a_box(graph: nx.DiGraph, nvlinks: nx.DiGraph) -> Callable[[int, int], list[Node]]:
    """Return paths: over NVLinks where two lead there, past the NVSwitch, or a GPU, as NCCL goes
    (its path type NVB). Else over PCIe alone, for the hardware forwards nothing between the two."""
    below = graph.copy()
    below.remove_edges_from(nvlinks.edges)
    over_nvlink, over_pcie = ShortestPaths(nvlinks), ShortestPaths(below)

    def path(src: int, dst: int) -> list[Node]:
        if src in nvlinks and dst in nvlinks and nx.has_path(nvlinks, src, dst) and (
                len(found := over_nvlink.path(src, dst)) <= 3):
            return found
        return over_pcie.path(src, dst)

    return path


def _join_cpus(graph: nx.DiGraph, cpus: Iterable[str]) -> None:
    for a, b in combinations(cpus, 2):
        join(graph, a, b, NVLINK_LATENCY_S, SOCKETS_BPS)


# ---- nvidia-smi topo -m --------------------------------------------------------------------------


def _nvidia_smi(text: str, path: Path) -> Topology:
    """The matrix says how two devices are joined: NV# by that many NVLinks, PIX and PXB through
    PCIe switches, PHB and NODE through one CPU, SYS through two."""
    names, rows, affinity = _matrix(text)
    gpus = [name for name in names if re.fullmatch(r"GPU\d+", name)]
    pairs = {(a, b): rows[a][names.index(b)] for a, b in combinations(names, 2) if a in rows}
    for (a, b), how in pairs.items():
        if b in rows and rows[b][names.index(a)] != how:
            raise ConfigError(f"{a} to {b} is {how}, but {b} to {a} is "
                              f"{rows[b][names.index(a)]}; give the output as it was printed")
    number = {gpu: rank for rank, gpu in enumerate(gpus)}
    graph = nx.DiGraph()
    graph.add_nodes_from(number.values(), kind="gpu", host=0)
    below = [pair for pair, how in pairs.items() if how in ("PIX", "PXB")]
    near = [pair for pair, how in pairs.items() if how in ("PIX", "PXB", "PHB", "NODE")]
    near += [(a, b) for a, b in combinations(gpus, 2)
             if affinity[a] == affinity[b] and pairs[a, b].startswith("NV") and affinity[a]]
    cpus = _groups(names, near, gpus)
    cpu_of = {gpu: f"cpu{cpu}" for cpu, members in enumerate(cpus) for gpu in members}
    graph.add_nodes_from(cpu_of.values(), kind="cpu")
    switches = 0
    for members in _groups(names, below, gpus):
        above = cpu_of[members[0]]
        if len(members) > 1:
            above, switches = f"pcie{switches}", switches + 1
            graph.add_node(above, kind="switch")
            join(graph, above, cpu_of[members[0]], PCIE_LATENCY_S, PCIE4_BPS)
        for gpu in members:
            join(graph, number[gpu], above, PCIE_LATENCY_S, PCIE4_BPS)
    _join_cpus(graph, dict.fromkeys(cpu_of.values()))
    _add_nvlinks(graph, {(number[a], number[b]): int(how[2:]) for (a, b), how in pairs.items()
                         if a in number and b in number and how.startswith("NV")}, len(gpus))
    others = [name for name in names if name not in gpus]
    return _finished(graph, path, "nvidia-smi", others,
                     f"taken from data sheets: {NVLINK_BPS / 1e9:g} GB/s for one NVLink each way "
                     f"(NVLink 5: twice that), PCIe 4.0 x16, {SOCKETS_BPS / 1e9:g} GB/s between "
                     f"CPUs")


def _matrix(text: str) -> tuple[list[str], dict[str, list[str]], dict[str, str]]:
    """Names of the columns; for each row that there is, its entries; each GPU's affinity."""
    lines = text.splitlines()
    top = next(n for n, line in enumerate(lines) if re.match(r"\s*GPU0\b", line))
    names = re.split(r"\s+(?:(?:CPU|NUMA)\s+Affinity|GPU\s+NUMA)", lines[top])[0].split()
    rows: dict[str, list[str]] = {}
    affinity = dict.fromkeys(names, "")
    for line in lines[top + 1:]:
        name, *words = line.split() or [""]
        if name not in names:
            continue
        if name in rows:
            raise ConfigError(f"there are two rows of {name}; give the output of one box")
        rows[name] = entries = words[: len(names)]
        for entry in [*entries, *["nothing"] * (len(names) - len(entries))]:
            if not re.fullmatch(r"X|NV[1-9]\d*|PIX|PXB|PHB|NODE|SYS|SOC", entry):
                raise ConfigError(f"the row of {name} has {entry!r} among its {len(names)} "
                                  f"entries, which are X, NV#, PIX, PXB, PHB, NODE or SYS")
        affinity[name] = "".join(words[len(names) :][:1]).replace("N/A", "")
    if missing := [name for name in names if name.startswith("GPU") and name not in rows]:
        raise ConfigError(f"the matrix has no row of {missing[0]}; give all of the output")
    return names, rows, affinity


def _groups(names: list[str], pairs: list[tuple[str, str]], gpus: list[str]) -> list[list[str]]:
    """The GPUs that `pairs` of devices join, directly or not."""
    graph = nx.Graph(pairs)
    graph.add_nodes_from(names)
    found = [[gpu for gpu in gpus if gpu in part] for part in nx.connected_components(graph)]
    return sorted([part for part in found if part], key=lambda part: gpus.index(part[0]))


def _add_nvlinks(graph: nx.DiGraph, links: dict[tuple[int, int], int], gpus: int) -> None:
    """Join each pair by its NVLinks. Where all pairs have as many, and together more than a GPU
    has, these are its links to an NVSwitch, of which each GPU uses all for any other."""
    counts = set(links.values())
    everyone = len(links) == gpus * (gpus - 1) // 2
    if everyone and len(counts) == 1 and max(counts) * (gpus - 1) > MOST_NVLINKS:
        graph.add_node("nvswitch", kind="switch")
        for gpu in range(gpus):
            join(graph, gpu, "nvswitch", PCIE_LATENCY_S, max(counts) * NVLINK_BPS)
        return
    for (a, b), count in links.items():
        join(graph, a, b, NVLINK_LATENCY_S, count * NVLINK_BPS)


# ---- NCCL ----------------------------------------------------------------------------------------


def _nccl(text: str, path: Path) -> Topology:
    """A tree: CPUs, below each its PCI devices, a bridge's below the bridge. NVLinks name what they
    lead to by its bus id, and whether that is a GPU, an NVSwitch or a CPU by its class."""
    if "<!ENTITY" in text:
        raise ConfigError("a topology of NCCL has no entities")
    try:
        system = ET.fromstring(text.strip().rstrip("\0"))
    except ET.ParseError as error:
        raise ConfigError(f"this is not XML: {error}") from None
    found = [(pci, gpu) for pci in system.iter("pci") for gpu in pci.findall("gpu")]
    if not found:
        raise ConfigError("there is no <gpu> in this topology of NCCL: a file that NCCL reads "
                          "(NCCL_TOPO_FILE) leaves out what NCCL finds by itself, such as NVLinks; "
                          "take one that it writes (NCCL_TOPO_DUMP_FILE)")
    found.sort(key=lambda both: (_number(both[1], "rank"), _number(both[1], "dev")))
    bus = [pci.get("busid", "").lower() for pci, _ in found]
    ranks = {id(pci): rank for rank, (pci, _) in enumerate(found)}
    if len(ranks) < len(found):
        raise ConfigError("two GPUs share a PCI device (MLOPart, MIG), which is not modelled")
    graph, ignored = nx.DiGraph(), ["attributes of vendors and models"]
    graph.add_nodes_from(range(len(found)), kind="gpu")
    hosts: dict[str, list[str]] = {}

    def add(above: str, element: ET.Element, host: int) -> None:
        """Add what hangs below `element` below the node `above`."""
        for child in element:
            name: Any = ranks.get(id(child), f"pci {child.get('busid')}" + f" of host {host}" * (
                host > 0))
            if child.tag == "nic":
                nets = [f"{net.get('name')} ({_number(net, 'speed') / 1e3:g} Gb/s)"
                        for net in child.iter("net")]
                ignored.extend(nets)
            elif child.tag == "pci":
                kind = "switch" if child.find("nic") is None else "nic"
                graph.add_node(name, **({"kind": "gpu", "host": host} if isinstance(name, int)
                                        else {"kind": kind}))
                join(graph, name, above, PCIE_LATENCY_S, _pcie_rate(child))
                add(name, child, host)
            elif child.tag != "gpu":
                ignored.append(f"<{child.tag}>")

    for number, cpu in enumerate(system.iter("cpu")):
        host = cpu.get("host_hash", "")
        hosts.setdefault(host, []).append(f"cpu{number}")
        graph.add_node(f"cpu{number}", kind="cpu")
        add(f"cpu{number}", cpu, [*hosts].index(host))
    for cpus in hosts.values():
        _join_cpus(graph, cpus)
    for rank, (_, gpu) in enumerate(found):
        _add_nccl_nvlinks(graph, rank, gpu, bus, ignored)
    return _finished(graph, path, "NCCL", ignored,
                     f"taken from data sheets: {NVLINK_BPS / 1e9:g} GB/s for one NVLink each way "
                     f"(sm 60: 20, sm 100: 50), {SOCKETS_BPS / 1e9:g} GB/s between CPUs, latencies")


def _add_nccl_nvlinks(graph: nx.DiGraph, rank: int, gpu: ET.Element, bus: list[str],
                      ignored: list[str]) -> None:
    each_Bps = max(Bps for sm, Bps in _NVLINK_BPS_FROM_SM if sm <= _number(gpu, "sm", 70))
    to_switch = 0.0
    for child in gpu:
        count, target = _number(child, "count", 1), child.get("target", "").lower()
        if child.tag != "nvlink":
            ignored.append(f"<{child.tag}>")
        elif there := [other for other, its in enumerate(bus) if its == target and other != rank
                       and graph.nodes[other]["host"] == graph.nodes[rank]["host"]]:
            join(graph, rank, there[0], NVLINK_LATENCY_S, count * each_Bps)
        elif child.get("tclass", "").startswith("0x0680"):
            to_switch += count * each_Bps
        else:
            ignored.append("NVLinks to no other GPU")
    if to_switch:
        graph.add_node("nvswitch", kind="switch")
        join(graph, rank, "nvswitch", PCIE_LATENCY_S, to_switch)


def _pcie_rate(pci: ET.Element) -> float:
    """GT/s · lanes · the share of data in what is sent: 8b/10b up to 5 GT/s, then 128b/130b."""
    found = re.match(r"\s*([0-9.]+)\s*GT/s", pci.get("link_speed", ""))
    giga = float(found[1]) if found else 8.0  # as NCCL does where the system doesn't tell
    lanes = _number(pci, "link_width")
    lanes = lanes if 1 <= lanes <= 32 else 16  # Linux says 255 of a width it doesn't know
    return max(giga, 2.5) * 1e9 * lanes / 8 * (0.8 if giga <= 5 else 128 / 130)


def _number(element: ET.Element, name: str, default: float = 0) -> float:
    try:
        value = float(element.get(name, default))
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise ConfigError(f"<{element.tag}> has {name}={element.get(name)!r}, which is no count")
    return value


# ---- ASTRA-sim -----------------------------------------------------------------------------------


def _astra_sim(text: str, path: Path) -> Topology:
    """Each dimension joins the NPUs that differ in it alone; the first dimension varies fastest."""
    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"this is not YAML: {getattr(error, 'problem', error)}") from None
    keys = ("topology", "npus_count", "bandwidth", "latency")
    if not isinstance(given, dict) or not all(key in given for key in keys):
        raise ConfigError(f"a network of ASTRA-sim has the keys {', '.join(keys)}")
    shapes, counts, widths, waits = (
        value if isinstance(value := given[key], list) else [value] for key in keys)
    if not len(shapes) == len(counts) == len(widths) == len(waits) or not shapes:
        raise ConfigError(f"{', '.join(keys)} must be lists of one length, a dimension each")
    for shape, count, width, wait in zip(shapes, counts, widths, waits, strict=True):
        check_choice("topology", shape, _SHAPES)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"npus_count {count!r} is not a whole number, 1 or more")
        for value, unit in ((width, "GB/s"), (wait, "ns")):
            if isinstance(value, bool) or not (
                    isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ConfigError(f"{value!r} is not a number of {unit}")
    npus = math.prod(counts)
    links = sum(npus * (count - 1 if shape == "FullyConnected" else 1)
                for shape, count in zip(shapes, counts, strict=True))
    if npus > MOST_NODES or links > _MOST_LINKS:
        raise ConfigError(f"{npus:,} NPUs with {links:,} links are too many; {MOST_NODES:,} and "
                          f"{_MOST_LINKS:,} are the most")
    graph = nx.DiGraph()
    graph.add_nodes_from(range(npus), kind="gpu")
    for dim, shape in enumerate(shapes):
        stride = math.prod(counts[:dim])
        others = product(range(stride), range(0, npus, stride * counts[dim]))
        for number, (low, high) in enumerate(others):
            group = [low + high + stride * place for place in range(counts[dim])]
            for a, b in _SHAPES[shape](group, f"switch{dim}.{number}"):
                if isinstance(b, str):
                    graph.add_node(b, kind="switch")
                join(graph, a, b, waits[dim] * 1e-9, widths[dim] * 1e9)
    return _finished(graph, path, "ASTRA-sim", [key for key in given if key not in keys],
                     "bandwidth is taken as 10⁹ bytes a second (ASTRA-sim's own code has counted "
                     "2³⁰), latency as ns of a link")


_SHAPES: dict[str, Callable[[list[int], str], list[tuple[Any, Any]]]] = {
    "Ring": lambda group, _: [(a, b) for a, b in zip(group, group[1:] + group[:1], strict=True)
                              if a != b],
    "FullyConnected": lambda group, _: list(combinations(group, 2)),
    "Switch": lambda group, switch: [(npu, switch) for npu in group if len(group) > 1],
}
