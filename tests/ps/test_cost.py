"""Simulated time follows the closed form max(mS/(n·B_server), S/B_worker), each way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtlab import ConfigError, cost, ps, simulate
from dtlab.topology import uniform, with_link
from dtlab.topology.base import Topology
from tests.ps.shared import on_workers

BYTES = 64 << 20
PORT_BPS = 10e9


def iteration_s(workers: int, servers: int, network: Topology) -> float:
    """One pull and one push by every worker at once, on tensors without data."""
    @on_workers(servers=servers, consistency=ps.ASP(), partition=ps.Range())
    def body(node: ps.Node) -> Any:
        w = torch.empty(BYTES // 4, device="meta")
        node.init({"w": w})
        begin_s = node.comm.now()
        node.pull(["w"], out={"w": torch.empty_like(w)})
        node.push({"w": w})
        return begin_s, node.comm.now()

    times = simulate(body, network=network, trace=False).values[servers:]
    return max(end for _, end in times) - min(begin for begin, _ in times)


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("workers", [1, 4])
def test_more_servers_share_the_load_until_the_workers_ports_are_the_floor(
    workers: int, servers: int
) -> None:
    network = uniform(servers + workers, 0, PORT_BPS)
    wanted = cost.parameter_server_s(workers, servers, BYTES, PORT_BPS)
    assert iteration_s(workers, servers, network) == pytest.approx(wanted, rel=1e-3)


def test_a_server_with_a_port_four_times_as_fast_serves_four_workers_at_their_speed() -> None:
    """So it must take in what several workers send at the same time, not one after the other."""
    network = uniform(5, 0, PORT_BPS)
    for a, b in ((0, "switch"),):
        network = with_link(network, a, b, bandwidth_Bps=4 * PORT_BPS)
    wanted = cost.parameter_server_s(4, 1, BYTES, 4 * PORT_BPS, PORT_BPS)
    assert wanted == pytest.approx(2 * BYTES / PORT_BPS)
    assert iteration_s(4, 1, network) == pytest.approx(wanted, rel=1e-3)


def test_textbook_values() -> None:
    """160 MB of gradients, 4 workers, 16 GB/s: through one server 80 ms; see chapter 07."""
    assert cost.parameter_server_s(4, 1, 160e6, 16e9) == pytest.approx(0.080)
    assert cost.parameter_server_s(4, 4, 160e6, 16e9) == pytest.approx(0.020)
    assert cost.parameter_server_s(4, 99, 160e6, 16e9) == pytest.approx(0.020)
    assert cost.parameter_server_s(4, 1, 160e6, 16e9, ways=1) == pytest.approx(0.040)


@pytest.mark.parametrize(("arguments", "says"), [
    ((0, 1, 8, 1e9), "workers"), ((1, 0, 8, 1e9), "servers"), ((1, 1, -8, 1e9), "nbytes"),
    ((1, 1, 8, 0), "server_Bps"), ((1, 1, 8, 1e9, -1), "worker_Bps"),
])
def test_arguments_that_make_no_sense_are_refused(arguments: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cost.parameter_server_s(*arguments)
