"""What starting a message takes belongs to a cluster, and stays with it whatever is changed."""

from __future__ import annotations

import pytest

from dtlab.errors import ConfigError
from dtlab.topology import (
    Topology,
    compose,
    dragonfly,
    fat_tree,
    from_graph,
    named,
    nvswitch,
    pcie_server,
    racks,
    torus,
    uniform,
    v100_nvlink,
    with_link,
    with_traffic,
)

BUILT = {
    "pcie_server": lambda **o: pcie_server(**o), "v100_nvlink": lambda **o: v100_nvlink(**o),
    "nvswitch": lambda **o: nvswitch(**o), "racks": lambda **o: racks(2, 2, **o),
    "fat_tree": lambda **o: fat_tree(4, **o), "torus": lambda **o: torus(3, 3, **o),
    "dragonfly": lambda **o: dragonfly(3, 2, 2, **o),
    "from_graph": lambda **o: from_graph(torus(2, 2).graph(), "by hand", **o),
}


@pytest.mark.parametrize("name", BUILT)
def test_every_builder_takes_an_overhead_and_has_one(name: str) -> None:
    assert BUILT[name]().overhead_s == 1e-6
    assert BUILT[name](overhead_s=2.5e-6).overhead_s == 2.5e-6
    with pytest.raises(ConfigError, match="overhead_s must be 0 or more, and finite, not -1"):
        BUILT[name](overhead_s=-1)


TORUS = torus(3, 3, overhead_s=2e-6)


@pytest.mark.parametrize("network", [
    with_link(TORUS, 0, 1, bandwidth_Bps=1e9), with_link(TORUS, 0, 1, bandwidth_Bps=1e9, at_s=1.0),
    with_traffic(TORUS, 0, 1, 1e9), compose(nvswitch(2, overhead_s=2e-6), racks(2, 2)),
    named("racks:2x2,overhead_s=2us"), uniform(4, 2e-6, 1e9)])
def test_what_is_made_of_a_cluster_keeps_it_and_on_a_uniform_network_it_is_the_latency(
        network: Topology) -> None:
    assert network.overhead_s == 2e-6
