"""Files that other tools have written: the box that they describe, or one sentence says no."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

import dtlab
from dtlab.topology import Topology, load, nvswitch, v100_nvlink
from tests.commands import call

LEGEND = "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"


def written(tmp_path: Path, text: str, name: str = "box.txt") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def matrix(names: list[str], rows: list[str], affinities: dict[str, str]) -> str:
    """As nvidia-smi prints it: tabs, an underlined header, a legend."""
    lines = ["\t\x1b[4m" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
             + "\x1b[0m"]
    for name, row in zip(names, rows, strict=True):
        lines.append("\t".join([name, *(f" {word} " for word in row.split()),
                                affinities.get(name, "")]))
    return "\n".join(lines) + "\n" + LEGEND


def rates(cluster: Topology, *path: object) -> list[float]:
    graph = cluster.graph()
    return [graph.edges[edge]["bandwidth_Bps"] for edge in pairwise(path)]


def test_a_matrix_of_pcie_and_nics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = matrix(["GPU0", "GPU1", "GPU2", "GPU3", "NIC0"],
                  ["X NV4 NODE SYS PXB", "NV4 X NODE SYS PXB", "NODE NODE X SYS NODE",
                   "SYS SYS SYS X SYS", "PXB PXB NODE SYS X"],
                  {"GPU0": "0-15\t0", "GPU1": "0-15\t0", "GPU2": "0-15\t0", "GPU3": "16-31\t1"})
    cluster = load(written(tmp_path, text))
    assert (cluster.ranks, cluster.groups) == (4, [[0, 1, 2, 3]])
    assert cluster.path(0, 1) == [0, 1]
    assert rates(cluster, 0, 1) == [4 * 25e9]
    assert cluster.path(0, 2) == [0, "pcie0", "cpu0", 2]  # both hang with NIC0 below a switch
    assert cluster.path(1, 3) == [1, "pcie0", "cpu0", "cpu1", 3]
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "25 GB/s for one NVLink" in said
    assert "ignored: NIC0\n" in said


def test_a_matrix_of_a_dgx_1v_has_the_links_of_that_builder(tmp_path: Path) -> None:
    built = v100_nvlink().graph()
    rows = [" ".join("X" if a == b else
                     f"NV{built.edges[a, b]['bandwidth_Bps'] / 25e9:.0f}" if (a, b) in built.edges
                     else "PIX" if a // 2 == b // 2 else "NODE" if a // 4 == b // 4 else "SYS"
                     for b in range(8)) for a in range(8)]
    names = [f"GPU{n}" for n in range(8)]
    cluster = load(written(tmp_path, matrix(names, rows, dict.fromkeys(names[:4], "0-9"))))
    for a, b in built.edges:
        if isinstance(a, int) and isinstance(b, int):
            assert rates(cluster, a, b) == [built.edges[a, b]["bandwidth_Bps"]]
    assert [cluster.path(0, b) for b in range(8)] == [v100_nvlink().path(0, b) for b in range(8)]


@pytest.mark.parametrize(("links", "gpus", "switched"), [
    (18, 8, True), (12, 8, True), (6, 16, True), (12, 2, False), (4, 4, False), (2, 4, False)])
def test_equal_nvlinks_to_all_lead_to_a_switch_if_a_gpu_has_no_more(
        links: int, gpus: int, switched: bool, tmp_path: Path) -> None:
    names = [f"GPU{n}" for n in range(gpus)]
    rows = [" ".join("X" if a == b else f"NV{links}" for b in names) for a in names]
    cluster = load(written(tmp_path, matrix(names, rows, {})))
    path = cluster.path(0, 1)
    assert path == ([0, "nvswitch", 1] if switched else [0, 1])
    assert set(rates(cluster, *path)) == {links * 25e9}
    if (links, gpus) == (12, 8):
        assert rates(nvswitch(8), 0, "nvswitch") == [300e9]  # the same box


NCCL = """<?xml version="1.0"?>
<system version="1">
  <cpu numaid="0" affinity="0000,000000ff" arch="x86_64" vendor="AuthenticAMD" modelid="49">
    <pci busid="0000:10:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:11:00.0" class="0x030200" link_speed="8 GT/s" link_width="8">
        <gpu dev="1" sm="80" rank="1" gdr="1">
          <nvlink target="0000:12:00.0" count="3" tclass="0x030200"/>
        </gpu>
      </pci>
      <pci busid="0000:12:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="0">
        <gpu dev="0" sm="80" rank="0" gdr="1">
          <nvlink target="0000:11:00.0" count="3" tclass="0x030200"/>
          <c2c bw="9" count="1"/>
        </gpu>
      </pci>
    </pci>
  </cpu>
  <cpu numaid="1">
    <pci busid="0000:20:00.0" class="0x030200" link_speed="5 GT/s" link_width="255">
      <gpu dev="2" sm="80" rank="2"/>
    </pci>
    <pci busid="0000:30:00.0" class="0x020700" link_speed="16.0 GT/s PCIe" link_width="16">
      <nic><net name="ib0" dev="0" speed="200000" port="1" latency="0.0" guid="0x1"/></nic>
    </pci>
  </cpu>
</system>
"""


def test_a_topology_of_nccl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = load(written(tmp_path, NCCL, "dump.xml"))
    assert cluster.ranks == 3
    assert cluster.path(0, 1) == [0, 1]  # by rank, not as they stand in the file
    assert rates(cluster, 0, 1) == [75e9]
    far = [1, "pci 0000:10:00.0", "cpu0", "cpu1", 2]
    assert cluster.path(1, 2) == far
    lane = 1e9 / 8 * 128 / 130
    assert rates(cluster, *far) == pytest.approx(
        [8 * 8 * lane, 16 * 16 * lane, 19.2e9, 5e9 / 8 * 16 * 0.8])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "<c2c>" in said
    assert "ib0 (200 Gb/s)" in said


def test_gpus_of_nccl_on_switches_share_one_crossbar(tmp_path: Path) -> None:
    gpus = "".join(
        f'<pci busid="0000:{n}1:00.0" class="0x030200" link_speed="32 GT/s" link_width="16">'
        f'<gpu dev="{n}" sm="90"><nvlink target="0000:f1:00.0" count="10" tclass="0x068000"/>'
        f'<nvlink target="0000:f2:00.0" count="8" tclass="0x068000"/></gpu></pci>' for n in (1, 2))
    cluster = load(written(tmp_path, f"<system><cpu>{gpus}</cpu></system>", "dump.xml"))
    assert cluster.path(0, 1) == [0, "nvswitch", 1]
    assert rates(cluster, 0, "nvswitch", 1) == [450e9, 450e9]


def test_a_network_of_astra_sim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = load(written(tmp_path, """\
topology: [ Ring, FullyConnected, Switch ]  # three dimensions
npus_count: [ 4, 2, 2 ]
bandwidth: [ 200.0, 100, 50.0 ]  # GB/s
latency: [ 50.0, 500.0, 2000.0 ]  # ns
""", "network.yml"))
    assert cluster.ranks == 16
    assert cluster.path(0, 3) == [0, 3]
    assert cluster.path(0, 4) == [0, 4]
    assert cluster.path(0, 8) == [0, "switch2.0", 8]
    assert rates(cluster, 0, 4) == [100e9]
    assert cluster.graph().edges[0, "switch2.0"]["latency_s"] == pytest.approx(2e-6)
    assert "10⁹" in capsys.readouterr().err
    one_line = '{"topology": ["Ring"], "npus_count": [3], "bandwidth": [9.0], "latency": [50.0]}'
    assert load(written(tmp_path, one_line, "network.json")).ranks == 3


@pytest.mark.parametrize(("text", "says"), [
    ("<?xml version='1.0'?>\n<!DOCTYPE platform SYSTEM 'simgrid.dtd'>\n<platform version='4.1'/>",
     "a platform of SimGrid; write the cluster in dtlab's own YAML"),
    ("# tree\nSwitchName=s0 Nodes=n[0-3]\nSwitchName=s1 Switches=s0", "Slurm's topology.conf"),
    ('<?xml version="1.0"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n<topology version="2.0">\n'
     '<object type="Machine"/></topology>', "a topology of hwloc"),
    ("<html></html>", "no topology of NCCL"),
    ("<system><cpu>", "not XML"),
    ("<system><cpu/></system>", "no <gpu>"),
    (NCCL.replace('count="3"', 'count="many"', 1), "<nvlink> has count='many'"),
    (matrix(["GPU0", "GPU1"], ["X NV2", "SYS X"], {}), "GPU0 to GPU1 is NV2, but GPU1 to GPU0"),
    (matrix(["GPU0", "GPU1"], ["X NODESYS", "SYS X"], {}), "the row of GPU0 has 'NODESYS'"),
    ("\tGPU0\tGPU1\nGPU0\tX\tSYS\n", "no row of GPU1"),
    ("topology: [Ring]\nnpus_count: [4, 2]\nbandwidth: [1]\nlatency: [1]", "lists of one length"),
    ("topology: [Star]\nnpus_count: [4]\nbandwidth: [1]\nlatency: [1]", "choose one of Ring"),
    ("topology: [[Ring]]\nnpus_count: [4]\nbandwidth: [1]\nlatency: [1]", "choose one of"),
    ("topology: [Ring]\nnpus_count: [4]\nbandwidth: [fast]\nlatency: [1]",
     "'fast' is not a number of GB/s"),
    ("topology: [FullyConnected]\nnpus_count: [60000]\nbandwidth: [1]\nlatency: [1]",
     "60,000 NPUs with 3,599,940,000 links are too many"),
    ("topology: [Ring]\nnpus_count: [4]\nlatency: [1]", "has the keys topology, npus_count"),
    ('{"topologies-per-dim": ["Ring"], "units-count": [4]}', "a network of ASTRA-sim 1"),
    ('{\n    "logical-dims": ["8"]\n}', "a logical topology of ASTRA-sim, which has no links"),
    ("3 1 2\n2\n0 2 400Gbps 0.0005ms 0\n1 2 400Gbps 0.0005ms 0", "a network of ns-3"),
    ('<graphs version="1"><graph id="0"/></graphs>', "a graph that NCCL has chosen"),
    ("==== ROCm System Management Interface ====\n       GPU0\nGPU0   0", "of rocm-smi"),
    (2 * matrix(["GPU0", "GPU1"], ["X NV2", "NV2 X"], {}), "two rows of GPU0"),
])
def test_what_is_not_read_says_what_it_is(text: str, says: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(dtlab.ConfigError) as told:
        load(path)
    assert str(told.value).startswith(str(path))
    assert says in str(told.value)


def test_a_number_without_unit_is_named_once(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """ranks: 3
links:
  - {between: [0, 1], bandwidth: 25, latency: 2us}
  - {between: [1, 2], bandwidth: 25GB/s, latency: 3}
"""
    load(written(tmp_path, text, "a.yaml"))
    said = capsys.readouterr().err
    assert "line 3: bandwidth 25 is read as 25 B/s, and 1 more" in said
    load(written(tmp_path, text.replace("25,", "inf,").replace("3}", "0}"), "a.yaml"))
    assert capsys.readouterr().err == ""


def test_the_command_line_takes_them(tmp_path: Path) -> None:
    done = call("simulate", "all_reduce", "-n", "1MB", "-t", written(tmp_path, NCCL, "dump.xml"))
    assert done.exit_code == 0, done.output
    assert "dump (NCCL)" in done.output
