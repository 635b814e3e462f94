"""What chapter 06 says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import math
import random
import re
from itertools import pairwise
from typing import Any

import networkx as nx
import pytest
import torch

from dtlab import Comm, cost, simulate, wires
from dtlab.collectives import all_reduce
from dtlab.topology import (
    Topology,
    compose,
    edge_disjoint_cycles,
    nvswitch,
    pcie_server,
    racks,
    torus,
    uniform,
    v100_nvlink,
)
from dtlab.topology.cycles import edges_of
from dtlab.topology.servers import V100_LINKS
from tests.notebooks.chapter import Chapter

printed = Chapter("06").printed
N = 160_000_000
RANKS = [*range(1, 10), 13]


def reduced(comm: Comm, algorithm: str, elements: int, options: dict[str, Any]) -> None:
    all_reduce(comm, torch.empty(elements, device="meta"), algorithm=algorithm, **options)


def ms(cluster: Topology, algorithm: str, options: dict[str, Any] | None = None) -> float:
    return wires.enter(cluster, N, algorithm, options).elapsed_s * 1e3


def rounds(ranks: int, algorithm: str, **options: Any) -> int:
    network = uniform(ranks, 1.0, math.inf)
    took = simulate(reduced, algorithm, ranks, options, network=network, trace=False).elapsed_s
    return round(took)


# ---- one server --------------------------------------------------------------------------------


def test_a_naive_ring_takes_six_times_what_the_wires_of_eight_v100_allow(prose: str) -> None:
    assert "it reaches a sixth of what the wires can carry" in prose
    bound = 2 * 7 / 8 * N / (6 * 25e9) * 1e3
    assert ms(v100_nvlink(), "ring") / bound == pytest.approx(6, abs=0.05)
    assert "There is no wire from 3 to 4, nor from 7 to 0" in prose
    assert (3, 4) not in V100_LINKS
    assert (0, 7) not in V100_LINKS
    assert "Of the 32 links (16 joined pairs of GPUs, two directions) the ring uses ten" in prose
    crossed = wires.enter(v100_nvlink(), N, "ring").crossed
    direct = [used for (a, b), used in crossed.items() if {type(a), type(b)} == {int}]
    assert len(direct) == 2 * len(V100_LINKS) == 32
    assert sum(used > 0 for used in direct) == 10


def test_four_gpus_in_60_80_and_15_ms(prose: str) -> None:
    assert "60, 80 and 15: the claim holds, if all GPUs hang on one switch" in prose
    assert "in quarters takes 20 ms, and the ring still takes 15" in prose
    assert re.findall(r"([\d.]+) ms", printed("four-ways-run")) == [
        "80", "60", "15", "15", "60", "20", "15"]
    assert "so four quarters leave a switch through its one uplink, in each of the two phases" in \
        prose
    ring = wires.enter(pcie_server(4, 2), N, "ring").crossed["pcie0", "cpu"]
    assert ring == 2 * 3 * N // 4


def test_six_rings_hold_every_wire_in_both_directions_and_are_of_two_shapes(prose: str) -> None:
    assert "The first four are one ring and its reverse, each twice, over the paired links" in prose
    rings = edge_disjoint_cycles(v100_nvlink(), 6)
    shapes = [{frozenset(edge) for edge in edges_of(ring)} for ring in rings]
    pairs, singles = ({frozenset(p) for p, n in V100_LINKS.items() if n == k} for k in (2, 1))
    assert shapes == [pairs] * 4 + [singles] * 2
    assert [list(edges_of(ring)) for ring in rings[:4]].count(list(edges_of(rings[0]))) == 2
    assert sum(map(len, shapes)) == 2 * sum(V100_LINKS.values()), "so there can't be a seventh"


def test_the_claimed_double_and_single_ring_are_this_mesh(prose: str) -> None:
    assert "a double ring 1-2-3-4-5-6-7-8 and a single ring 1-4-6-3-5-8-2-7" in prose
    claimed, real = nx.Graph(), nx.Graph()
    nx.add_cycle(claimed, [1, 2, 3, 4, 5, 6, 7, 8], links=2)
    nx.add_cycle(claimed, [1, 4, 6, 3, 5, 8, 2, 7], links=1)
    real.add_edges_from((a, b, {"links": n}) for (a, b), n in V100_LINKS.items())
    assert nx.is_isomorphic(real, claimed, edge_match=lambda e, f: e == f)


def test_about_6_ms_and_its_three_corrections(prose: str) -> None:
    for text in ("5.93 ms", "5.19 ms", "about 6 ms down to 1.87 ms"):
        assert text in prose
    assert round(2 * N / 54e9 * 1e3, 2) == 5.93
    for link_Bps, count, claim in ((18e9, 3, 5.19), (25e9, 3, 3.73), (25e9, 6, 1.87)):
        server = v100_nvlink(latency_s=0.0, link_Bps=link_Bps)
        assert round(2 * 7 / 8 * N / (count * link_Bps) * 1e3, 2) == claim
        cycles = edge_disjoint_cycles(server, count)
        assert round(ms(server, "two_ring", {"cycles": cycles}), 2) == claim


def test_two_rings_beat_three_and_six_miss_the_bound_by_latency(prose: str) -> None:
    assert "Six rings come within 3.2 % of the bound" in prose
    assert "in each of 14 steps a rank starts six messages, one after the other" in prose
    took = {count: ms(v100_nvlink(), "two_ring", {"cycles": edge_disjoint_cycles(
        v100_nvlink(), count)}) for count in range(1, 7)}
    bound = 2 * 7 / 8 * N / 150e9 * 1e3
    assert bound < took[6] < 1.032 * bound
    assert took[6] - bound == pytest.approx(14 * 6 * 0.7e-3, rel=0.01)
    assert "why are three rings slower than two?" in prose
    assert took[2] < took[3]
    assert "One good ring takes half the time of the naive one" in prose
    assert took[1] / ms(v100_nvlink(), "ring") == pytest.approx(0.5, abs=0.01)


def test_what_a_broken_link_costs(prose: str) -> None:
    assert "Rank 0 has four wires left, 100 GB/s, so nothing can be faster than 2.80 ms" in prose
    out = sum(n for pair, n in V100_LINKS.items() if 0 in pair and pair != (0, 3))
    assert out == 4
    bound = 2 * 7 / 8 * N / (out * 25e9) * 1e3
    assert bound == pytest.approx(2.8)
    assert "four rings found anew reach that within 1.5 %" in prose
    anew = float(re.findall(r"anew: +([\d.]+) ms", printed("breaks-link-run"))[0])
    assert bound < anew < 1.015 * bound


# ---- racks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_a_ring_is_only_as_good_as_its_order(prose: str, seed: int) -> None:
    assert "with its ranks mixed up is about as bad: other orders take 300 to 400 ms" in prose
    mixed = {"cycles": [random.Random(seed).sample(range(32), 32)]}
    taken_s = wires.enter(racks(4, 8, oversubscription=16), N, "two_ring", mixed).elapsed_s
    assert 0.295 < taken_s < 0.405


def test_in_the_racks_the_order_of_partners_decides(prose: str) -> None:
    found = {name: (float(ms), float(up), float(needs)) for name, ms, up, needs in re.findall(
        r"^(\w+) +([\d.]+) ms; .*: +([\d.]+) n, which needs +([\d.]+) ms", printed("racks-run"),
        re.M)}
    ring, far, near = (found[name] for name in ("ring", "halving_doubling",
                                                "halving_doubling_near"))
    assert "sends just as few bytes as the ring and takes six times as long, if each rank" in prose
    assert "first swaps half of its vector with a rank half the cluster away" in prose
    assert cost.sent_bytes("all_reduce", "ring", 32, N) == \
        cost.sent_bytes("all_reduce", "halving_doubling", 32, N)
    assert "313 ms against 50" in prose
    assert "With near partners first it takes 61 ms instead of 313" in prose
    assert (round(far[0]), round(ring[0]), round(near[0])) == (313, 50, 61)
    assert "12 n go up where the ring sends less than 2 n" in prose
    assert "puts 1.5 n on the uplink, less than the ring" in prose
    assert far[1] == 12
    assert near[1] == 1.5 < ring[1] < 2
    assert "it takes a fifth longer than the ring" in prose
    assert near[0] / ring[0] == pytest.approx(1.2, abs=0.03)
    assert far[0] / near[0] == pytest.approx(5, abs=0.2)
    assert "its uplinks rest in those rounds, while the ring keeps them full" in prose
    assert ring[2] / ring[0] > 0.99
    assert near[2] / near[0] < 0.65
    assert "On a uniform network, both take the same time." in prose
    flat = uniform(32, 5e-6, 12.5e9)
    assert ms(flat, "halving_doubling_near") == ms(flat, "halving_doubling")


@pytest.mark.parametrize("groups", [2, 3, 4])
def test_hierarchical_and_torus_put_2_times_g_minus_1_by_g_n_on_each_uplink(
    prose: str, groups: int
) -> None:
    assert "the busiest of g racks must send at least 2(g−1)/g·n" in prose
    cluster = racks(groups, 4)
    n = 4 * 4 * 3 * 4 * 100
    for algorithm, options in (("hierarchical", {"group": 4}), ("torus", {"shape": (4, groups)})):
        crossed = wires.enter(cluster, n, algorithm, options).crossed
        for rack in range(groups):
            assert crossed[f"rack{rack}", "spine"] == 2 * (groups - 1) * n // groups


def test_near_partners_first_beat_the_ring_where_uplinks_are_narrow(prose: str) -> None:
    assert "here it is ahead from 32:1 on; with two racks of four, from 8:1 on" in prose
    for shape, first in (((4, 8), 32), ((2, 4), 8)):
        for ratio in (first / 2, first * 0.9, first, 4 * first):
            cluster = racks(*shape, oversubscription=ratio)
            ahead = ms(cluster, "halving_doubling_near") < ms(cluster, "ring")
            assert ahead == (ratio >= first), (shape, ratio)


def test_hierarchical_pays_where_a_group_is_a_server_and_not_in_plain_racks(prose: str) -> None:
    rows = re.findall(r"(\w+) +([\d.]+) ms; up", printed("hierarchical-run"))
    racks_ms, servers_ms = ({name: float(ms) for name, ms in each} for each in (rows[:3], rows[3:]))
    assert "hierarchical is slower than the ring: 83 ms against 50" in prose
    assert (round(racks_ms["hierarchical"]), round(racks_ms["ring"])) == (83, 50)
    assert "into which 4.1 n go" in prose
    slow = racks(4, 8, oversubscription=16)
    into = wires.enter(slow, N, "hierarchical", {"group": 8}).crossed["rack0", 0]
    assert into / N == pytest.approx(3 * 7 / 8 + 1.5) == pytest.approx(4.1, abs=0.03)
    assert "where a group is a server with NVSwitch, it beats the ring" in prose
    assert servers_ms["hierarchical"] < servers_ms["ring"]
    assert "With 2 such servers on a switch it takes three fifths" in prose
    assert "with 16 it saves 3 %" in prose
    for servers, share in ((2, 0.6), (16, 0.97)):
        cluster = compose(nvswitch(8), uniform(servers, 5e-6, 12.5e9), nic_Bps=12.5e9)
        assert ms(cluster, "hierarchical", {"group": 8}) / ms(cluster, "ring") == pytest.approx(
            share, abs=0.01)
    assert "Groups of four, in a cluster whose servers have eight GPUs: right sums, too slow" in \
        prose
    took = dict(re.findall(r"groups of +(\d+): +([\d.]+) ms", printed("breaks-groups-run")))
    assert min(took, key=lambda group: float(took[group])) == "8"


# ---- the torus ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("x", "y"), [(1, 1), (1, 7), (7, 1), (2, 2), (3, 4), (4, 3), (13, 2)])
def test_a_torus_has_twice_x_minus_1_and_twice_y_minus_1_rounds(prose: str, x: int, y: int) -> None:
    assert "2(X−1) + 2(Y−1)" in prose
    assert rounds(x * y, "torus", shape=(x, y)) == 2 * (x - 1) + 2 * (y - 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_hierarchical_rounds(ranks: int) -> None:
    for k in (k for k in range(1, ranks + 1) if ranks % k == 0):
        assert rounds(ranks, "hierarchical", group=k) == 4 * (k - 1) + 2 * (ranks // k - 1)


def test_the_large_grids(prose: str) -> None:
    assert "34 × 32 = 1088 ranks need 128 rounds instead of 2174" in prose
    assert cost.rounds("all_reduce", "torus", 1088, 4 * 1088) == 128 == 2 * 33 + 2 * 31
    assert cost.rounds("all_reduce", "ring", 1088, 4 * 1088) == 2174
    assert "68 × 32 = 2176 ranks need 196 instead of 4350" in prose
    assert 2 * 67 + 2 * 31 == 196
    assert cost.rounds("all_reduce", "ring", 2176, 4 * 2176) == 4350
    assert "groups of 16 on 1024 ranks need 186 instead of 2046" in prose
    assert 4 * 15 + 2 * 63 == 186
    assert cost.rounds("all_reduce", "ring", 1024, 4096) == 2046


# ---- the contest -------------------------------------------------------------------------------


def test_who_wins_where(prose: str) -> None:
    entries = wires.contest(wires.examples(), [N, 64_000])
    best = wires.winners(entries)
    won = {size: {name: {a for c, s, a in best if (c, s) == (name, size)}
                  for name in wires.examples()} for size in (N, 64_000)}
    large, small = won[N], won[64_000]
    assert "On a crossbar all that are optimal on paper tie" in prose
    both = {"halving_doubling", "halving_doubling_near"}
    assert large["NVSwitch, 8 GPUs"] == {"ring", *both, "torus", "two_ring"}
    assert "rings with wires of their own win, by factors of 5.4 and 3.7" in prose
    for name, factor in (("8 V100, NVLink mesh", 5.4), ("torus 4 × 4", 3.7)):
        assert large[name] == {"two_ring"}
        times = sorted(e.elapsed_s for e in entries if (e.cluster, e.nbytes) == (name, N))
        assert times[1] / times[0] == pytest.approx(factor, abs=0.05)
    assert "where servers with NVSwitch stand in racks, the torus wins" in prose
    assert large["NVSwitch servers in racks"] == {"torus"}
    assert "Two win nowhere, here or in the second table: the tree, which moves whole" in prose
    assert "vectors, and hierarchical: wherever that does well, the torus does better" in prose
    assert not {"tree", "hierarchical"} & set().union(*large.values(), *small.values())
    took = {(e.cluster, e.algorithm, e.nbytes): e.elapsed_s for e in entries}
    assert "with far partners first, the worst in two; with near partners first" in prose
    worst = [max((took[name, a, N], a) for a in wires.CONTESTANTS)[1] for name in won[N]]
    assert [worst.count(name) for name in sorted(both)] == [2, 0]
    assert "Where far partners first and near ones differ, near ones are faster" in prose
    for name in won[N]:
        for size in won:
            near, far = (took[name, a, size] for a in sorted(both, reverse=True))
            assert near < far * (1 + 1e-9)
    assert "halving–doubling wins everywhere but on the torus network, where the torus" in prose
    for name, names in small.items():
        assert names == {"torus"} if name == "torus 4 × 4" else names <= both


# ---- a thousand --------------------------------------------------------------------------------


def time_s(algorithm: str, ranks: int) -> float:
    return cost.time_s("all_reduce", algorithm, ranks, 102_400_000, 5e-6, 1 / 25e9)


def test_from_820_ranks_on_half_of_the_ring_is_latency(prose: str) -> None:
    assert "at 1024 ranks more than half of the ring's time is α" in prose
    assert time_s("ring", 1024) / 2 < 2 * 1023 * 5e-6
    assert "the torus takes less than half of the ring's time" in prose
    assert time_s("torus", 1024) < time_s("ring", 1024) / 2
    assert "With vectors of 1 GB it is eight thousand ranks" in prose
    assert round(1e9 / 25e9 / 5e-6) == 8000
    assert "It overtakes the ring between 1024 and 2048 ranks" in prose
    assert time_s("hierarchical", 1024) > time_s("ring", 1024)
    assert time_s("hierarchical", 2048) < time_s("ring", 2048)


def test_a_switch_that_adds_saves_nearly_half_and_flags_take_their_share(prose: str) -> None:
    assert "nβ instead of 2(p−1)/p·nβ, nearly half" in prose
    assert cost.lower_bound_s("all_reduce", 1024, N, 0.0, 1.0) / N == pytest.approx(2, abs=0.01)
    assert "120 bytes with an 8-byte flag" in prose
    assert "94 % of the bandwidth" in prose
    assert round(120 / 128, 2) == 0.94


def test_what_the_wires_explain_of_the_reported_efficiencies(prose: str) -> None:
    rows = {line.split(" ms")[0].rsplit(None, 1)[0].strip(): [float(share) for share in
            re.findall(r"([\d.]+)%", line)] for line in printed("published-table").splitlines()[1:]}
    gaps = {who: wires_only - reported for who, (wires_only, reported) in rows.items()}
    assert "Three rows come within four points of the report" in prose
    assert [round(abs(gap)) for gap in gaps.values()] == [4, 15, 1, 2]
    assert "The first is below it" in prose
    assert next(iter(gaps.values())) < 0
    assert "by 15 points, 1, and 2, from top to bottom" in prose


def test_a_torus_network_has_four_wires_out_of_each_rank_and_the_algorithm_uses_one_at_a_time(
    prose: str
) -> None:
    assert "four wires out of each rank. Why does the torus algorithm use only one of them" in prose
    cluster = torus(4, 4)
    assert set(dict(cluster.graph().out_degree).values()) == {4}
    options = {"shape": (4, 4)}
    trace = simulate(reduced, "torus", 1600, options, network=cluster).trace
    for rank in range(16):
        sent = sorted((m for m in trace.transfers if m.src == rank), key=lambda m: m.start_s)
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in pairwise(sent))


def test_the_ring_is_the_best_for_large_vectors_on_the_mesh_only(prose: str) -> None:
    assert "True in one line of four: 160 MB on the mesh" in prose
    rows = re.findall(r"best: (\w+), rings take ([\d.]+)", printed("best-run"))
    assert rows[0] == ("two_ring", "1.00")
    assert {best for best, _ in rows[1:]} == {"halving_doubling"}
    assert "6.9 times as fast as six rings" in prose
    mesh, large, small = (float(times) for _, times in rows[1:])
    assert (round(mesh, 1), round(small, 1)) == (6.9, 3.5)
    assert "the ring is 1 % behind halving–doubling, which saves 22 of 30 latencies" in prose
    assert round(large, 2) == 1.01
    assert (rounds(16, "ring"), rounds(16, "halving_doubling")) == (30, 8)
    assert "One naive ring is not that bad with so few bytes, 24 µs" in prose
    assert round(wires.enter(v100_nvlink(), 64_000, "ring").elapsed_s * 1e6) == 24


def test_the_base_of_an_efficiency_matters_by_a_third_of_a_point_to_two_and_a_half(
    prose: str
) -> None:
    assert "A third of a point to two and a half" in prose
    rows = re.findall(r"one GPU ([\d.]+)%, against one server ([\d.]+)%",
                      printed("base-run"))
    gained = [float(server) - float(gpu) for gpu, server in rows]
    assert len(gained) == 4
    assert min(gained) == pytest.approx(0.3, abs=0.05)
    assert max(gained) == pytest.approx(2.6, abs=0.1)
