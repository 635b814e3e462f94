"""Placements inside one machine: the same sum everywhere, and the time that each takes."""

from __future__ import annotations

import pytest
import torch

from dtlab import Comm, ConfigError, run, simulate
from dtlab.ps import gpu_placement
from dtlab.topology import link_bytes


def numbers(rank: int, n: int) -> torch.Tensor:
    """Whole numbers, so that every order of adding gives the same."""
    return torch.randint(1, 9, (n,), generator=torch.Generator().manual_seed(rank))


def summed(comm: Comm, place: str, n: int) -> torch.Tensor:
    return gpu_placement.sum_on_gpus(comm, numbers(comm.rank, n), place)


@pytest.mark.parametrize("place", gpu_placement.GPU_PLACEMENTS)
@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("n", [0, 1, 10, 999])
def test_every_gpu_has_the_sum_over_the_gpus(place: str, gpus: int, n: int) -> None:
    total = torch.stack([numbers(rank, n) for rank in range(gpus)]).sum(0)
    for x in simulate(summed, place, n, network=gpu_placement.gpus_and_cpu(gpus)).values[:gpus]:
        assert torch.equal(x, total)


@pytest.mark.parametrize("place", gpu_placement.GPU_PLACEMENTS)
def test_on_real_processes_too(place: str) -> None:
    total = torch.stack([numbers(rank, 100) for rank in range(3)]).sum(0)
    assert all(torch.equal(x, total) for x in run(summed, place, 100, ranks=4).values[:3])


@pytest.mark.parametrize(("place", "switches", "ms"), [
    ("on GPU 0", 1, 60), ("on the CPU", 1, 80), ("spread over the GPUs", 1, 15),
    ("in a ring, no server", 1, 15),
    ("on GPU 0", 2, 60), ("on the CPU", 2, 40), ("spread over the GPUs", 2, 20),
    ("in a ring, no server", 2, 15),
])
def test_160_megabytes_over_16_gigabytes_a_second(place: str, switches: int, ms: float) -> None:
    def gradients(comm: Comm) -> None:
        gpu_placement.sum_on_gpus(comm, torch.empty(40_000_000, device="meta"), place)

    cluster = gpu_placement.gpus_and_cpu(4, switches)
    assert simulate(gradients, network=cluster).elapsed_s * 1e3 == pytest.approx(ms)


@pytest.mark.parametrize("place", gpu_placement.GPU_PLACEMENTS)
def test_the_servers_are_those_who_add_up(place: str) -> None:
    cluster = gpu_placement.gpus_and_cpu(4)
    result = simulate(summed, place, 1000, network=cluster)
    crossed = link_bytes(cluster, result.trace)
    into = {rank: crossed["cpu" if rank == 4 else "pcie0", rank] for rank in range(5)}
    servers = gpu_placement.servers_of(place, 4)
    if servers:
        assert [rank for rank in into if into[rank] == max(into.values())] == servers
    assert (into[4] > 0) == (place == "on the CPU")


def test_a_place_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no placement 'on the moon'; .*choose one of on GPU 0"):
        gpu_placement.servers_of("on the moon", 4)
