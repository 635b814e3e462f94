"""Clusters: which links a message crosses, how long it takes to get there, how fast they are.

A topology is a description that the simulator runs, the plots draw and the planner reads. Links
are directed and numbered; a message from one rank to another takes a *route*, a list of links.
Every link is full duplex: its two directions don't slow each other.
"""

from dtlab.topology.base import Change, Node, Topology, check_link, check_ranks, uniform
from dtlab.topology.changes import with_link, with_traffic
from dtlab.topology.compose import compose
from dtlab.topology.cycles import edge_disjoint_cycles
from dtlab.topology.files import load, save
from dtlab.topology.graphs import from_graph
from dtlab.topology.meshes import dragonfly, torus
from dtlab.topology.names import named
from dtlab.topology.servers import nvswitch, pcie_server, v100_nvlink
from dtlab.topology.traffic import check_trace, link_bytes, send_together
from dtlab.topology.trees import fat_tree, racks

__all__ = [
    "Topology",
    "Node",
    "uniform",
    # One server.
    "pcie_server",
    "v100_nvlink",
    "nvswitch",
    # Many hosts.
    "racks",
    "fat_tree",
    "torus",
    "dragonfly",
    "compose",
    # Of any shape; by name; as files.
    "from_graph",
    "named",
    "load",
    "save",
    # Rings among the links.
    "edge_disjoint_cycles",
    # What goes over the links.
    "send_together",
    "link_bytes",
    "check_trace",
    # Links that change.
    "with_link",
    "with_traffic",
    "Change",
    "check_link",
    "check_ranks",
]
