"""Push and pull, in one level, two levels and trees: the sum, over the wires that it must take."""

from __future__ import annotations

import doctest
import math
from typing import Any

import pytest
import torch

from dtlab import Comm, ConfigError, run, simulate
from dtlab.collectives import all_gather, reduce_scatter
from dtlab.ps import push_pull, two_level
from dtlab.ps import where as homes
from dtlab.topology import link_bytes, nvswitch, racks, uniform
from dtlab.topology.compose import compose

RANKS = [*range(1, 10), 13]
SIZES = [0, 1, 7, 24, 1000]


def numbers(rank: int, n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Whole numbers, so that every order of adding gives the same."""
    return torch.randint(1, 9, (n,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def total(ranks: Any, n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.stack([numbers(rank, n, dtype) for rank in ranks]).sum(0).to(dtype)


def trip(comm: Comm, n: int, servers: list[int], workers: list[int],
         dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return push_pull.push_pull(comm, numbers(comm.rank, n, dtype), servers, workers)


def layouts(p: int) -> list[tuple[list[int], list[int]]]:
    """(servers, workers): apart, in the middle, all together, some of the workers."""
    everyone = list(range(p))
    found = [([p - 1], everyone), (everyone, everyone), (everyone[::2], everyone)]
    for n in {1, p // 2, p - 1} - {0}:
        if n < p:
            found += [(everyone[:n], everyone[n:]), (everyone[p - n:], everyone[: p - n])]
    return found


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("n", SIZES)
def test_every_worker_has_the_sum_of_the_workers_wherever_the_servers_are(p: int, n: int) -> None:
    for servers, workers in layouts(p):
        found = simulate(trip, n, servers, workers, network=uniform(p, 1e-6, 1e9)).values
        for worker in workers:
            assert torch.equal(found[worker], total(workers, n)), (servers, workers)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.complex64, torch.float16])
def test_any_dtype(dtype: torch.dtype) -> None:
    found = simulate(trip, 10, [0, 1], [1, 2, 3], dtype, network=uniform(4, 0, math.inf)).values
    assert all(torch.equal(x, total([1, 2, 3], 10, dtype)) for x in found[1:])


def test_on_real_processes() -> None:
    for x in run(trip, 1001, [0, 3], [0, 1, 2, 3], ranks=4).values:
        assert torch.equal(x, total(range(4), 1001))


def test_any_shape_and_an_update_of_each_piece() -> None:
    def halved(comm: Comm) -> torch.Tensor:
        x = torch.ones(3, 5) * 2**comm.rank
        return push_pull.push_pull(comm, x, [0, 2], update=lambda piece: piece.div_(2))

    for x in simulate(halved, network=uniform(3, 0, math.inf)).values:
        assert torch.equal(x, torch.full((3, 5), 3.5))


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8, 13])
@pytest.mark.parametrize("servers", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("server_Bps", [1e9, 4e9, 0.5e9])
def test_the_formula_says_what_the_simulator_does(workers: int, servers: int,
                                                  server_Bps: float) -> None:
    def meta(comm: Comm, n: int, serving: list[int], working: list[int]) -> None:
        push_pull.push_pull(comm, torch.empty(n // 4, device="meta"), serving, working)

    n, p = 5040 * 1000 * 4, workers + servers
    if server_Bps == 1e9:
        one = simulate(meta, n, list(range(servers)), list(range(servers, p)),
                       network=uniform(p, 0.0, 1e9))
        wanted = push_pull.push_pull_s(n, workers, servers, 1e9)
        assert one.elapsed_s == pytest.approx(wanted, rel=1e-4)
        if servers <= workers:
            both = simulate(meta, n, list(range(servers)), list(range(workers)),
                            network=uniform(workers, 0.0, 1e9))
            wanted = push_pull.push_pull_s(n, workers, servers, 1e9, colocated=True)
            assert both.elapsed_s == pytest.approx(wanted, rel=1e-4)
    else:
        wanted = 2 * max(workers * n / servers / server_Bps, n / 1e9)
        assert push_pull.push_pull_s(n, workers, servers, 1e9, server_Bps) == pytest.approx(wanted)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("n", [0, 7, 1000])
def test_servers_on_all_workers_are_a_reduce_scatter_and_an_all_gather(p: int, n: int) -> None:
    everyone = list(range(p))

    def both(comm: Comm) -> torch.Tensor:
        x = torch.zeros(-(-n // p) * p, dtype=torch.float64)  # parts must be of one size
        x[:n] = numbers(comm.rank, n)
        part = reduce_scatter(comm, x.view(p, -1))
        return all_gather(comm, part).flatten()[:n]

    network = uniform(p, 0, math.inf)
    ours = simulate(trip, n, everyone, everyone, network=network)
    for mine, theirs in zip(ours.values, simulate(both, network=network).values, strict=True):
        assert torch.equal(mine, theirs)
    for rank in everyone:
        mine = n // p + (rank < n % p)  # elements of its piece
        sent = 8 * ((n - mine) + (p - 1) * mine)
        assert ours.trace.sent_bytes(rank) == sent


# ---- two levels, and trees ---------------------------------------------------------------------

MACHINES: list[list[list[int]]] = [
    [[0]], [[0, 1, 2]], [[0], [1], [2]], [[0, 1, 2, 3], [4, 5, 6, 7]], [[4, 0], [1, 3, 2]],
    [[0], [1, 2, 3, 4, 5, 6, 7, 8]], [[2, 1], [0, 5, 9], [3, 4, 6, 7, 8], [10, 11], [12]],
]


def leveled(comm: Comm, n: int, machines: list[list[int]], servers: list[int]) -> torch.Tensor:
    return two_level.two_level(comm, numbers(comm.rank, n), machines, servers)


@pytest.mark.parametrize("machines", MACHINES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 30])
@pytest.mark.parametrize("where", ["first aggregator", "all aggregators", "apart"])
def test_two_levels_give_the_sum(machines: list[list[int]], n: int, where: str) -> None:
    workers = sorted(rank for machine in machines for rank in machine)
    aggregators = [machine[0] for machine in machines]
    p = len(workers) + 2 * (where == "apart")
    servers = {"first aggregator": aggregators[:1], "all aggregators": aggregators,
               "apart": [p - 2, p - 1]}[where]
    found = simulate(leveled, n, machines, servers, network=uniform(p, 1e-6, 1e9)).values
    for worker in workers:
        assert torch.equal(found[worker], total(workers, n))


def test_two_levels_on_real_processes() -> None:
    found = run(leveled, 1001, [[0, 1], [2, 3]], [0, 2], ranks=4).values
    assert all(torch.equal(x, total(range(4), 1001)) for x in found)


@pytest.mark.parametrize(("machines", "gpus"), [(2, 4), (4, 2), (3, 8)])
def test_between_machines_a_vector_a_machine_rather_than_a_vector_a_worker(
    machines: int, gpus: int
) -> None:
    cluster = compose(nvswitch(gpus), uniform(machines, 0.0, 1e9))
    n, p = 1200, machines * gpus
    ranks = [list(range(m * gpus, (m + 1) * gpus)) for m in range(machines)]

    def out(result: Any) -> int:
        return sum(count for (_, b), count in link_bytes(cluster, result.trace).items()
                   if b == "switch")

    vector = 8 * n
    plain = simulate(trip, n, [0], list(range(p)), network=cluster)
    two = simulate(leveled, n, ranks, [0], network=cluster)
    shared = simulate(leveled, n, ranks, [machine[0] for machine in ranks], network=cluster)
    assert out(plain) == 2 * gpus * (machines - 1) * vector
    assert out(two) == out(shared) == 2 * (machines - 1) * vector


def test_the_steps_stand_in_the_trace_in_their_order() -> None:
    trace = simulate(leveled, 12, [[0, 1], [2, 3]], [4], network=uniform(5, 1.0, math.inf)).trace
    starts: dict[str, float] = {}
    for m in trace.transfers:
        starts[m.label] = min(m.start_s, starts.get(m.label, math.inf))
    steps = two_level.STEPS
    assert sorted(starts, key=lambda label: starts[label]) == [steps[i] for i in (1, 3, 5, 6)]


TREES: list[Any] = [[0], [0, 1, 2], [[0, 1], [2, 3]], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
                    [[3, 1], 0, [[2], [4, 5]]]]


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("n", [0, 11])
def test_a_tree_gives_the_sum_and_updates_once(tree: Any, n: int) -> None:
    p = 1 + max(rank for group in two_level.levels(tree) for rank in group)

    def plus_one(comm: Comm) -> torch.Tensor:
        return two_level.through_tree(comm, numbers(comm.rank, n), tree, lambda x: x.add_(1))

    for x in simulate(plus_one, network=uniform(p, 1e-6, 1e9)).values:
        assert torch.equal(x, total(range(p), n) + 1)


def test_a_tree_takes_time_by_levels_where_one_server_takes_time_by_workers() -> None:
    def nested(low: int, high: int) -> Any:
        if high - low == 1:
            return low
        middle = (low + high) // 2
        return [nested(low, middle), nested(middle, high)]

    def climb(comm: Comm, tree: Any) -> None:
        two_level.through_tree(comm, torch.empty(1000, device="meta"), tree)

    for lg in range(1, 6):
        network = uniform(2**lg, 0.0, 4000.0)  # a vector a second
        assert simulate(climb, nested(0, 2**lg), network=network).elapsed_s == pytest.approx(2 * lg)
        alone = simulate(climb, list(range(2**lg)), network=network).elapsed_s
        assert alone == pytest.approx(2 * (2**lg - 1))


def test_between_racks_a_tree_sends_one_vector_each_way() -> None:
    cluster = racks(2, 4, oversubscription=4)

    def climb(comm: Comm, tree: Any) -> None:
        two_level.through_tree(comm, torch.empty(1000, device="meta"), tree)

    trace = simulate(climb, [[0, 1, 2, 3], [4, 5, 6, 7]], network=cluster).trace
    crossed = link_bytes(cluster, trace)
    assert crossed["rack1", "spine"] == crossed["rack0", "spine"] == 4000


# ---- placements --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", homes.PLACEMENTS)
@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
def test_every_placement_gives_the_gpus_their_sum(where: str, gpus: int) -> None:
    def gpu(comm: Comm) -> torch.Tensor:
        return homes.aggregate(comm, numbers(comm.rank, 10), where)

    for x in simulate(gpu, network=homes.gpus_and_cpu(gpus)).values[:gpus]:
        assert torch.equal(x, total(range(gpus), 10))


@pytest.mark.parametrize(("where", "switches", "ms"), [
    ("on GPU 0", 1, 60), ("on the CPU", 1, 80), ("spread over the GPUs", 1, 15),
    ("in a ring, no server", 1, 15),
    ("on GPU 0", 2, 60), ("on the CPU", 2, 40), ("spread over the GPUs", 2, 20),
    ("in a ring, no server", 2, 15),
])
def test_160_mb_on_4_gpus(where: str, switches: int, ms: float) -> None:
    def gradients(comm: Comm) -> None:
        homes.aggregate(comm, torch.empty(40_000_000, device="meta"), where)

    cluster = homes.gpus_and_cpu(4, switches)
    assert simulate(gradients, network=cluster).elapsed_s * 1e3 == pytest.approx(ms)


# ---- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("servers", "workers", "word"), [
    ([0, 0], [1], "servers"), ([0], [1, 1], "workers"), ([], [0], "servers"),
    ([7], [0], "servers"), ([0], [-1], "workers"),
])
def test_lists_that_make_no_sense_are_refused(servers: list[int], workers: list[int],
                                              word: str) -> None:
    with pytest.raises(ConfigError, match=f"{word} must be different ranks"):
        simulate(trip, 4, servers, workers, network=uniform(3, 0, 1e9))


@pytest.mark.parametrize("machines", [[], [[0], []], [[0, 1], [1]]])
def test_machines_that_make_no_sense_are_refused(machines: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match="machines must be lists of different ranks"):
        simulate(leveled, 4, machines, [0], network=uniform(2, 0, 1e9))


def test_other_nonsense_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no more servers than workers"):
        push_pull.push_pull_s(1, 2, 3, 1e9, colocated=True)
    with pytest.raises(ConfigError, match="no placement"):
        homes.servers_of("on the moon", 4)
    with pytest.raises(ConfigError, match="empty list"):
        two_level.levels([[], [1]])


@pytest.mark.parametrize("module", [push_pull, two_level, homes])
def test_examples_in_docstrings(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
