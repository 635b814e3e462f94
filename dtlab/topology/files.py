"""Topologies as files, in YAML (of which JSON is a part):

    name: two racks
    ranks: 4                  # 0, 1, 2, 3
    kind: host                # of all ranks: host (the default) or gpu
    nodes: {tor0: switch, tor1: switch}
    groups: [[0, 1], [2, 3]]  # optional: the ranks that share a host
    overhead: 1us             # optional: what starting a message takes its sender, see Topology
    links:
      - {between: [0, tor0], bandwidth: 25GB/s, latency: 2us}    # both directions
      - {from: tor0, to: tor1, bandwidth: 100Gb/s, latency: 2us} # one direction
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import networkx as nx
import yaml

from dtlab.errors import ConfigError
from dtlab.topology.base import OVERHEAD_S, Node, Topology, check_count, check_link, check_topology
from dtlab.topology.formats import notice, recognized
from dtlab.topology.graphs import RANK_KINDS, from_graph
from dtlab.units import bandwidth_of, seconds_of

KEYS = ("name", "ranks", "kind", "nodes", "groups", "overhead", "links")
MOST_BYTES = 10_000_000
LINK_KEYS = ("between", "from", "to", "bandwidth", "latency")


def load(path: str | Path) -> Topology:
    """The topology that the file describes; see the module's text. Routes are shortest paths, as
    for `from_graph`.

    bandwidth: of one direction: 25GB/s, 100Gb/s in bits, or a number of bytes per second. latency:
    2us, 0.5ms, or a number of seconds. Raises `ConfigError` with the file and the line of what is
    wrong: unknown keys and nodes, links without bandwidth, ranks that nothing leads to.

    Read as well: the output of `nvidia-smi topo -m`, the XML that NCCL writes to
    NCCL_TOPO_DUMP_FILE, and a network file of ASTRA-sim 2. What such a file does not say, what the
    model leaves out, and numbers without a unit are named on stderr.
    """
    if not isinstance(path, (str, Path)) or "\0" in str(path):
        raise ConfigError(f"a topology is loaded from a file's path, not from {path!r:.60}")
    path = Path(path)
    text = _text_of(path)
    return recognized(text, path) or _File(path, text).topology()


def _text_of(path: Path) -> str:
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{path} can't be read: it is no ordinary file")
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} is too large: a topology has {MOST_BYTES:,} bytes at most")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text in UTF-8") from None


def save(topology: Topology, path: str | Path) -> None:
    """Write `topology` so that `load` gives the same graph.

    Where nodes stand in a picture is not written, nor are kinds of ranks other than rank 0's, nor
    routes: `load` searches for shortest paths, which for some builders (torus, dragonfly) are
    others than the builder's own. Raises `ConfigError` if the file can't be written, or if links
    change later on, which a file does not say.
    """
    check_topology("what is saved", topology)
    if not isinstance(path, (str, Path)) or "\0" in str(path):
        raise ConfigError(f"a topology is saved to a file's path, not to {path!r:.60}")
    if topology.changes:
        raise ConfigError(f"{topology.name} changes while it runs, which a file can't say; "
                          f"save it first, then add the changes")
    try:
        Path(path).write_text("\n".join(_lines(topology)) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from None


class _File:
    """One file, while it is read. YAML is read as its tree of nodes, for these know their lines."""

    def __init__(self, path: Path, text: str):
        self.path = path
        self.unitless: list[str] = []  # quantities that are numbers alone, and how they are read
        try:
            self.root = yaml.compose(text, yaml.SafeLoader)
        except RecursionError:
            raise ConfigError(f"{path}: lists and mappings are nested too deeply") from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f", line {mark.line + 1}" if mark else ""
            problem = getattr(error, "problem", None) or "it is not a text"
            raise ConfigError(f"{path}{line}: this is not YAML: {problem}") from None
        if self.root is None:
            raise ConfigError(f"{path} is empty; it needs the keys ranks and links")

    def topology(self) -> Topology:
        top = self.mapping(self.root, "a topology", KEYS)
        for key in ("ranks", "links"):
            if key not in top:
                self.wrong(self.root, f"there is no key {key!r}")
        graph = nx.DiGraph()
        self.add_nodes(graph, top)
        self.add_groups(graph, top)
        first_line: dict[tuple[Node, Node], int] = {}
        for link in self.sequence(top["links"], "links"):
            self.add_link(graph, link, first_line)
        for rank in range(self.ranks):
            if self.ranks > 1 and not graph.degree(rank):
                self.wrong(top["links"], f"rank {rank} has no link")
        name = self.text(top["name"], "name") if "name" in top else self.path.stem
        overhead_s = self.quantity(top["overhead"], "overhead", seconds_of) \
            if "overhead" in top else OVERHEAD_S
        if self.unitless:
            more = f", and {len(self.unitless) - 1} more" if len(self.unitless) > 1 else ""
            notice(self.path, f"{self.unitless[0]}{more}; write a unit, as in 25GB/s, 100Gb/s, 2us")
        try:
            return from_graph(graph, name, overhead_s)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from None

    def add_nodes(self, graph: nx.DiGraph, top: dict[str, yaml.Node]) -> None:
        self.ranks = self.whole(top["ranks"], "ranks")
        with self.naming_line_of(top["ranks"]):
            check_count("ranks", self.ranks)
        kind = self.text(top["kind"], "kind") if "kind" in top else "host"
        if kind not in RANK_KINDS:
            self.wrong(top["kind"], f"kind must be host or gpu, not {kind!r}")
        graph.add_nodes_from(range(self.ranks), kind=kind)
        if "nodes" in top:
            for name, node in self.mapping(top["nodes"], "nodes").items():
                if _is_whole(name):
                    self.wrong(node, f"a node that is no rank needs a name, not the number {name}")
                graph.add_node(name, kind=self.text(node, f"the kind of {name}"))

    def add_groups(self, graph: nx.DiGraph, top: dict[str, yaml.Node]) -> None:
        if "groups" not in top:
            graph.add_nodes_from((rank, {"host": rank}) for rank in range(self.ranks))
            return
        for host, group in enumerate(self.sequence(top["groups"], "groups")):
            for item in self.sequence(group, "a group"):
                rank = self.whole(item, "a rank")
                if not 0 <= rank < self.ranks:
                    self.wrong(item, f"there is no rank {rank}; ranks are 0 to {self.ranks - 1}")
                if "host" in graph.nodes[rank]:
                    self.wrong(item, f"rank {rank} is in two groups")
                graph.nodes[rank]["host"] = host
        for rank in range(self.ranks):
            if "host" not in graph.nodes[rank]:
                self.wrong(top["groups"], f"rank {rank} is in no group")

    def add_link(self, graph: nx.DiGraph, node: yaml.Node,
                 first_line: dict[tuple[Node, Node], int]) -> None:
        link = self.mapping(node, "a link", LINK_KEYS)
        ends = {"between"} & link.keys() or {"from", "to"} & link.keys()
        if ends not in ({"between"}, {"from", "to"}) or len(link) != len(ends) + 2:
            self.wrong(node, "a link needs bandwidth, latency, and either between: [a, b] for both "
                             "directions or from: a, to: b for one")
        pair = self.sequence(link["between"], "between") if "between" in link else [
            link["from"], link["to"]]
        if len(pair) != 2:
            self.wrong(node, f"a link is between two nodes, not {len(pair)}")
        a, b = (self.end(end, graph) for end in pair)
        latency_s = self.quantity(link["latency"], "latency", seconds_of)
        bandwidth_Bps = self.quantity(link["bandwidth"], "bandwidth", bandwidth_of)
        if a == b:
            self.wrong(node, f"this link leads from {a} to itself")
        with self.naming_line_of(node):
            check_link(latency_s, bandwidth_Bps)
        for edge in [(a, b), (b, a)] if "between" in link else [(a, b)]:
            if edge in first_line:
                self.wrong(node, f"the link from {edge[0]} to {edge[1]} is already in line "
                                 f"{first_line[edge]}")
            first_line[edge] = _line(node)
            graph.add_edge(*edge, latency_s=latency_s, bandwidth_Bps=bandwidth_Bps)

    def end(self, node: yaml.Node, graph: nx.DiGraph) -> Node:
        """One end of a link: a rank or the name of a node."""
        name = self.text(node, "an end of a link")
        end: Node = int(name) if _is_whole(name) else name
        if end not in graph:
            known = f"ranks are 0 to {self.ranks - 1}" if isinstance(end, int) else \
                "list it under nodes, with its kind"
            self.wrong(node, f"there is no node {name}; {known}")
        return end

    # ---- the parts of YAML ---------------------------------------------------------------------

    def mapping(self, node: yaml.Node, what: str,
                keys: tuple[str, ...] | None = None) -> dict[str, yaml.Node]:
        """key → node, in their order; `keys` are those that may be there."""
        if not isinstance(node, yaml.MappingNode):
            self.wrong(node, f"{what} is written as `key: value` pairs")
        pairs: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = self.text(key, "a key")
            if keys is not None and name not in keys:
                self.wrong(key, f"{what} has no key {name!r}; its keys are {', '.join(keys)}")
            if name in pairs:
                self.wrong(key, f"{name!r} is here for the second time")
            pairs[name] = value
        return pairs

    def sequence(self, node: yaml.Node, what: str) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode):
            self.wrong(node, f"{what} must be a list")
        return list(node.value)

    def text(self, node: yaml.Node, what: str) -> str:
        if not isinstance(node, yaml.ScalarNode) or not node.value:
            self.wrong(node, f"{what} must be one word or number")
        return str(node.value)

    def whole(self, node: yaml.Node, what: str) -> int:
        text = self.text(node, what)
        if not _is_whole(text):
            self.wrong(node, f"{what} must be a whole number, not {text!r}")
        if len(text) > 9:
            self.wrong(node, f"{what} is too large a number")
        return int(text)

    def quantity(self, node: yaml.Node, what: str, parse: Callable[[str], float]) -> float:
        text = self.text(node, what)
        with self.naming_line_of(node):
            value = parse(text)
        if not re.search(r"[bBs]$", text) and 0 < value < math.inf:
            unit = "s" if parse is seconds_of else "B/s"
            self.unitless.append(f"line {_line(node)}: {what} {text} is read as {value:g} {unit}")
        return value

    @contextmanager
    def naming_line_of(self, node: yaml.Node) -> Iterator[None]:
        """Inside, the message of a `ConfigError` gets the file and the line of `node`."""
        try:
            yield
        except ConfigError as error:
            self.wrong(node, str(error))

    def wrong(self, node: yaml.Node, text: str) -> NoReturn:
        raise ConfigError(f"{self.path}, line {_line(node)}: {text}")


def _is_whole(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]+", text) is not None


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _lines(topology: Topology) -> list[str]:
    graph = topology.graph()
    lines = [f"name: {_quoted(topology.name)}", f"ranks: {topology.ranks}",
             f"kind: {graph.nodes[0].get('kind', 'host')}"]
    named = {node: data for node, data in graph.nodes(data=True) if isinstance(node, str)}
    if named:
        lines.append("nodes:")
        lines += [f"  {_quoted(node)}: {_quoted(data.get('kind', 'switch'))}"
                  for node, data in named.items()]
    if len(topology.groups) < topology.ranks:
        lines.append(f"groups: {topology.groups}")
    if topology.overhead_s != OVERHEAD_S:
        lines.append(f"overhead: {_latency(topology.overhead_s)}")
    lines.append("links:" if graph.edges else "links: []")
    for (a, b), data in graph.edges.items():
        both = graph.has_edge(b, a) and graph.edges[b, a] == data
        if both and _position(a) > _position(b):
            continue  # written with the other direction
        ends = f"between: [{_quoted(a)}, {_quoted(b)}]" if both else \
            f"from: {_quoted(a)}, to: {_quoted(b)}"
        lines.append(f"  - {{{ends}, bandwidth: {_bandwidth(data['bandwidth_Bps'])}, "
                     f"latency: {_latency(data['latency_s'])}}}")
    return lines


def _position(node: Node) -> tuple[bool, Any]:
    return isinstance(node, str), node


def _quoted(node: Node) -> str:
    """Write `node` as YAML reads it back: plain where that is safe."""
    plain = isinstance(node, int) or node.isidentifier()
    return str(node) if plain else json.dumps(node, ensure_ascii=False)


def _bandwidth(value_Bps: float) -> str:
    text = f"{value_Bps / 1e9:g}GB/s"
    return text if bandwidth_of(text) == value_Bps else f"{value_Bps!r}B/s"


def _latency(value_s: float) -> str:
    text = f"{value_s * 1e6:g}us"
    return text if seconds_of(text) == value_s else f"{value_s!r}s"
