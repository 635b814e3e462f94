"""A topology as a file: it comes back as it went, and mistakes are told with their lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

import dtlab
from dtlab import topology
from dtlab.topology import load, named, save

GOOD = """\
name: two racks
ranks: 4
nodes: {tor0: switch, tor1: switch}
groups: [[0, 1], [2, 3]]
links:
  - {between: [0, tor0], bandwidth: 25GB/s, latency: 2us}
  - {between: [1, tor0], bandwidth: 25GB/s, latency: 2us}
  - {between: [2, tor1], bandwidth: 25GB/s, latency: 2us}
  - {between: [3, tor1], bandwidth: 25GB/s, latency: 2us}
  - {from: tor0, to: tor1, bandwidth: 100Gb/s, latency: 0.5ms}
  - {from: tor1, to: tor0, bandwidth: 1e9, latency: 0}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


def same_graph(one: nx.DiGraph, other: nx.DiGraph) -> bool:
    return (dict(one.nodes(data=True)) == dict(other.nodes(data=True))
            and dict(one.edges) == dict(other.edges))


def test_a_file_is_read_with_its_units(tmp_path: Path) -> None:
    cluster = load(written(tmp_path, GOOD))
    graph = cluster.graph()
    assert (cluster.name, cluster.ranks) == ("two racks", 4)
    assert cluster.groups == [[0, 1], [2, 3]]
    assert graph.edges[0, "tor0"] == graph.edges["tor0", 0] == {
        "bandwidth_Bps": 25e9, "latency_s": pytest.approx(2e-6)}
    assert graph.edges["tor0", "tor1"]["bandwidth_Bps"] == 12.5e9
    assert graph.edges["tor1", "tor0"] == {"bandwidth_Bps": 1e9, "latency_s": 0}
    assert cluster.path(0, 3) == [0, "tor0", "tor1", 3]


def test_json_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    path.write_text(json.dumps({"ranks": 2, "links": [
        {"between": [0, 1], "bandwidth": "1GB/s", "latency": "1us"}]}, indent=2))
    assert load(path).ranks == 2
    assert load(path).name == "pair"


@pytest.mark.parametrize("cluster", [
    topology.uniform(3, 1.23456789e-6, 1e10 / 3), topology.uniform(2, 0, float("inf")),
    topology.uniform(1, 0, 1), topology.pcie_server(), topology.v100_nvlink(),
    topology.nvswitch(), topology.racks(2, 3, gpus=2, overhead_s=2.5e-6), topology.fat_tree(4),
    topology.torus(3, 4, overhead_s=0), topology.torus(1, 1), topology.dragonfly(3, 2, 2),
    topology.compose(topology.nvswitch(2), topology.racks(2, 2)),
], ids=lambda cluster: cluster.name)
def test_what_is_saved_comes_back(cluster: topology.Topology, tmp_path: Path) -> None:
    path = tmp_path / "saved.yaml"
    save(cluster, path)
    again = load(path)
    for what in ("name", "ranks", "groups", "overhead_s"):
        assert getattr(again, what) == getattr(cluster, what)
    wanted = cluster.graph()
    for rank in range(cluster.ranks):
        wanted.nodes[rank]["host"] = cluster.host_of(rank)
    for node, data in wanted.nodes(data=True):
        data.pop("pos", None)  # a file does not say where nodes stand in a picture
        if isinstance(node, str):
            data.pop("host", None)  # of a card: only ranks have groups
    assert same_graph(again.graph(), wanted)


def test_one_way_links_come_back(tmp_path: Path) -> None:
    save(load(written(tmp_path, GOOD)), tmp_path / "again.yaml")
    assert same_graph(load(tmp_path / "again.yaml").graph(),
                      load(tmp_path / "cluster.yaml").graph())


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new, 1)


@pytest.mark.parametrize(("text", "says"), [
    ("", "is empty"),
    ("- 1", "line 1: a topology is written as"),
    ("ranks: 2", "line 1: there is no key 'links'"),
    ("links: []", "line 1: there is no key 'ranks'"),
    ("a: [1", "line 1: this is not YAML"),
    ("ranks: &a [*a]\nlinks: []", "ranks must be one word or number"),
    (changed("groups:", "group:"), "line 4: a topology has no key 'group'; its keys are name, "),
    (changed("ranks: 4", "ranks: four"), "line 2: ranks must be a whole number, not 'four'"),
    (changed("ranks: 4", "ranks: 0"), "line 2: ranks must be a whole number, 1 or more, not 0"),
    (changed("ranks: 4", "ranks: 5"), "line 4: rank 4 is in no group"),
    (changed("ranks: 4", "ranks: 4\nranks: 4"), "line 3: 'ranks' is here for the second time"),
    (changed("ranks: 4", "ranks: 4\nkind: switch"), "line 3: kind must be host or gpu"),
    (changed("ranks: 4", "ranks: 4\noverhead: -1us"), "line 3: '-1us' is not a time"),
    (changed("ranks: 4", "ranks: 4\noverhead: fast"), "line 3: 'fast' is not a time"),
    (changed("[2, 3]]", "[2, 3, 1]]"), "line 4: rank 1 is in two groups"),
    (changed("[2, 3]]", "[2, 3, 9]]"), "line 4: there is no rank 9; ranks are 0 to 3"),
    (changed("tor1: switch", "7: switch"), "line 3: a node that is no rank needs a name"),
    (changed("tor1: switch", "tor1: gpu"), "node 'tor1' is a gpu"),
    (changed("[0, tor0]", "[0, tor9]"), "line 6: there is no node tor9; list it under nodes"),
    (changed("[3, tor1]", "[9, tor1]"), "line 9: there is no node 9; ranks are 0 to 3"),
    (changed("[0, tor0]", "[0, tor0, tor1]"), "line 6: a link is between two nodes, not 3"),
    (changed("[0, tor0]", "[0, 0]"), "line 6: this link leads from 0 to itself"),
    (changed("[1, tor0]", "[0, tor0]"), "line 7: the link from 0 to tor0 is already in line 6"),
    (changed("25GB/s", "0GB/s"), "line 6: bandwidth_Bps must be more than 0"),
    (changed("25GB/s", "-1GB/s"), "line 6: '-1GB/s' is not a bandwidth"),
    (changed("25GB/s", "fast"), "line 6: 'fast' is not a bandwidth"),
    (changed("2us", "-2us"), "line 6: '-2us' is not a time"),
    (changed("2us", "2 weeks"), "line 6: '2 weeks' is not a time"),
    (changed("latency: 2us", "delay: 2us"), "line 6: a link has no key 'delay'"),
    (changed(", latency: 2us", ""), "line 6: a link needs bandwidth, latency, and either"),
    (changed("from: tor0, ", ""), "line 10: a link needs"),
    (GOOD.replace("  - {between: [3, tor1], bandwidth: 25GB/s, latency: 2us}\n", ""),
     "line 6: rank 3 has no link"),
    (changed("  - {from: tor1, to: tor0, bandwidth: 1e9, latency: 0}\n", ""),
     "no way from rank 2 to rank 0"),
    ("ranks: 2\nlinks: 7", "line 2: links must be a list"),
    ("ranks: 2\nlinks: []", "line 2: rank 0 has no link"),
])
def test_a_mistake_is_told_with_its_line(text: str, says: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(dtlab.ConfigError) as told:
        load(path)
    assert str(told.value).startswith(str(path))
    assert says in str(told.value)
    assert "\n" not in str(told.value)


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(dtlab.ConfigError, match=r"none\.yaml can't be read: No such file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(dtlab.ConfigError, match="can't be written"):
        save(topology.nvswitch(2), tmp_path / "no" / "folder.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(dtlab.ConfigError, match="UTF-8"):
        load(tmp_path / "bytes.yaml")


@pytest.mark.parametrize(("text", "name"), [
    ("torus:4x4", topology.torus(4, 4).name),
    ("torus:2x3x4,bandwidth_Bps=10GB/s", topology.torus(2, 3, 4, bandwidth_Bps=10e9).name),
    ("racks:4x8,oversubscription=2", topology.racks(4, 8, oversubscription=2).name),
    ("nvswitch", topology.nvswitch().name),
    ("v100_nvlink:detour=pcie", topology.v100_nvlink("pcie").name),
    ("fat_tree:16,hosts=100", topology.fat_tree(16, hosts=100).name),
    ("uniform:4,latency_s=5us,bandwidth_Bps=10GB/s", topology.uniform(4, 5e-6, 10e9).name),
    ("nvswitch:8@racks:2x2",
     topology.compose(topology.nvswitch(8), topology.racks(2, 2)).name),
])
def test_topologies_have_names_to_type(text: str, name: str) -> None:
    assert named(text).name == name


@pytest.mark.parametrize(("text", "says"), [
    ("torsu:4x4", "no topology 'torsu'; did you mean 'torus'\\? choose one of uniform,"),
    ("torus", "missing a required argument: 'x'; write torus:XxY"),
    ("torus:4", "torus:4: missing a required argument: 'y'; write torus:XxY"),
    ("torus:4x4,color=red", "unexpected keyword argument 'color'"),
    ("pcie_server:4x2x1", "too many sizes; write pcie_server:"),
    ("v100_nvlink:8", "too many sizes; write v100_nvlink, and key=value for detour, "),
    ("torus:4x-4", "'4x-4' is neither sizes"),
    ("torus:4x4,5", "'5' is neither sizes"),
    ("torus:4x4,latency_s=soon", "'soon' is not a time"),
    ("torus:0x4", "x must be a whole number, 1 or more, not 0"),
    ("racks:2x2,oversubscription=much", "oversubscription must be"),
    ("nvswitch:8@", "no topology ''"),
    ("/nowhere/a.yaml", "can't be read"),
])
def test_a_name_that_makes_no_sense_is_refused(text: str, says: Any) -> None:
    with pytest.raises(dtlab.ConfigError, match=says):
        named(text)
