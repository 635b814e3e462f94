"""What chapter 02 says in prose, recomputed."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dtlab import Comm, collectives, cost, simulate, topology
from dtlab.cli import app
from dtlab.collectives import all_reduce
from dtlab.simulator import replay
from dtlab.topology import Topology, fat_tree, link_bytes, racks, send_together
from dtlab.units import bandwidth_of
from dtlab.widgets.topology import CLUSTERS
from tests.notebooks.chapter import Chapter

CHAPTER = Chapter("02")
printed = CHAPTER.printed
GB = 10**9
TEN_GIGABIT_BPS = 1.25e9


def said(words: str) -> None:
    assert words.replace("*", "") in CHAPTER.prose


def elapsed_s(cluster: Topology, flows: dict[tuple[int, int], int]) -> float:
    return simulate(send_together, flows, network=cluster).elapsed_s


def two_by_two() -> Topology:
    return racks(2, 2, oversubscription=2, latency_s=0, bandwidth_Bps=TEN_GIGABIT_BPS)


# ---- bits, bytes, and parts --------------------------------------------------------------------


def test_a_terabyte_over_200_gigabit_takes_40_seconds() -> None:
    said("It does: 40.0 s.")
    assert 1e12 * 8 / 200e9 == 1e12 / bandwidth_of("200Gb/s") == 40.0


def test_gpt3_flat_and_ring() -> None:
    n = 175_000_000_000 * 4
    assert n == 700 * GB
    for algorithm, busiest, seconds in (("flat", 2 * n, 4 * n / 25e9),
                                        ("ring", 4 / 3 * n, 4 / 3 * n / 25e9)):
        sent = cost.sent_bytes("all_reduce", algorithm, 3, n)
        assert max(sent) == pytest.approx(busiest)
        assert sum(sent) == pytest.approx(4 * n) == 2800 * GB
        assert cost.time_s("all_reduce", algorithm, 3, n, 5e-6, 1 / 25e9) == pytest.approx(
            seconds, rel=1e-5)
    said("no rank sends more than 933 GB")
    said("It takes a third of the time")
    assert round(4 / 3 * n / GB) == 933


def test_the_numbers_of_pcie_nvlink_and_hbm() -> None:
    pcie4_Bps, hbm_Bps = 16e9 * 16 * 128 / 130 / 8, 5120 / 8 * 1512e6 * 2
    assert pcie4_Bps == pytest.approx(31.5e9, rel=1e-3)
    said("31.5 GB/s **in each direction**, 63 GB/s in both")
    graph = topology.v100_nvlink().graph()
    for gpu in range(8):
        out = sum(d["bandwidth_Bps"] for _, b, d in graph.out_edges(gpu, data=True)
                  if isinstance(b, int))
        assert 2 * out == 300e9
    assert topology.nvswitch(8).capacity_Bps[0] == 300e9  # A100: 600 both ways
    assert hbm_Bps == pytest.approx(1935e9, rel=1e-3)
    said("a factor of 1500")
    assert hbm_Bps / TEN_GIGABIT_BPS == pytest.approx(1500, rel=0.05)


# ---- flows -------------------------------------------------------------------------------------


def test_flow_b_needs_its_share_and_then_all() -> None:
    said("At 1.6 s the first gigabyte is through")
    trace = simulate(send_together, {(0, 2): GB, (1, 3): 2 * GB}, network=two_by_two()).trace
    assert [m.end_s for m in trace.transfers] == pytest.approx([1.6, 2.4])
    assert 2 * GB / TEN_GIGABIT_BPS == 1.6  # answer A: alone
    assert elapsed_s(two_by_two(), {(0, 2): 2 * GB, (1, 3): 2 * GB}) == pytest.approx(3.2)  # C


def test_flows_held_back_elsewhere_leave_seven_eighths() -> None:
    said("an eighth of a cable each, so 2 → 0 takes the other seven eighths")
    narrow = racks(2, 4, oversubscription=16, latency_s=0, bandwidth_Bps=TEN_GIGABIT_BPS)
    trace = simulate(send_together, {(4, 0): GB, (5, 1): GB, (2, 0): 8 * GB}, network=narrow).trace
    rates = {(f.message.src, f.message.dst): f.rate_Bps / TEN_GIGABIT_BPS
             for f in replay(narrow, trace)[0].moving}
    assert rates == pytest.approx({(4, 0): 1 / 8, (5, 1): 1 / 8, (2, 0): 7 / 8})


@pytest.mark.parametrize("ratio", [1, 2, 4, 8, 16])
def test_oversubscription_costs_its_factor_between_racks_and_nothing_within(ratio: int) -> None:
    hall = racks(2, 16, oversubscription=ratio, latency_s=0, bandwidth_Bps=TEN_GIGABIT_BPS)
    across = {(server, server + 16): GB for server in range(16)}
    within = {(server, (server + 1) % 16): GB for server in range(16)}
    assert elapsed_s(hall, across) == pytest.approx(0.8 * ratio)
    assert elapsed_s(hall, within) == pytest.approx(0.8)


def test_two_servers_into_one_uplink_are_two_to_one() -> None:
    said("two into one is 2:1")
    rack = two_by_two()
    into = sum(TEN_GIGABIT_BPS for _ in range(2))
    (uplink,) = [rack.capacity_Bps[n] for n in range(len(rack.capacity_Bps))
                 if rack.ends(n) == ("rack0", "spine")]
    assert into / uplink == 2


def test_the_answers_to_the_questions_about_the_explorer() -> None:
    said("*Two racks*: 6.4 ms with 4:1, 2.6 ms with 1:1")
    unequal = {(rank, rank + 4): 8_000_000 * (rank + 1) for rank in range(4)}
    assert [round(elapsed_s(racks(2, 4, oversubscription=ratio), unequal) * 1e3, 1)
            for ratio in (4.0, 1.0)] == [6.4, 2.6]
    said("5 ms after the start, when two of the four messages are through")
    trace = simulate(send_together, unequal, network=racks(2, 4)).trace
    assert sum(m.end_s <= 5e-3 for m in trace.transfers) == 2
    said("six messages cross each, and five of them are of other pairs")
    crossed = Counter(hop for a in range(8) for b in range(8) if a != b
                      for hop in pairwise(topology.v100_nvlink().path(a, b)))
    assert {hop for hop, count in crossed.items() if count == max(crossed.values())} == {
        (3, 7), (7, 3)}
    assert crossed[3, 7] == 6
    said("everywhere but on *4 servers in 2 racks*. There, rack 1's uplink stays full to the end")
    for name, text in CLUSTERS.items():
        cluster = topology.named(text)
        into_one = {(rank, 0): 8_000_000 for rank in range(1, cluster.ranks)}
        moments = replay(cluster, simulate(send_together, into_one, network=cluster).trace)
        late = [m for m in moments if m.start_s < 0.9 * moments[-1].end_s <= m.end_s]
        full = {cluster.ends(link) for m in late for link, load in m.loads.items() if load > 0.999}
        assert any(to == 0 for _, to in full) == (name != "4 servers in 2 racks"), name
        assert (("rack1", "spine") in full) == (name == "4 servers in 2 racks")


# ---- placing -----------------------------------------------------------------------------------


def ring_job(comm: Comm, order: list[int]) -> None:
    all_reduce(comm.split(0, key=order.index(comm.rank)),
               torch.empty(16_000_000, device="meta"), algorithm="ring")


def test_racks_in_turn_take_four_times_as_long_over_uplinks_with_four_times_the_bytes() -> None:
    said("the same bytes sent; four times the time")
    hall = racks(2, 4, oversubscription=4)
    runs = [simulate(ring_job, order, network=hall)
            for order in ([0, 1, 2, 3, 4, 5, 6, 7], [0, 4, 1, 5, 2, 6, 3, 7])]
    assert runs[1].elapsed_s / runs[0].elapsed_s == pytest.approx(4, rel=0.01)
    assert runs[0].trace.sent_bytes() == runs[1].trace.sent_bytes()
    up = [link_bytes(hall, run.trace)["rack0", "spine"] for run in runs]
    assert up[1] == 4 * up[0]
    good, bad = (next(s for s in replay(hall, run.trace) if s.start_s <= 1e-4 < s.end_s)
                 for run in runs)
    said("every cable is full, and each uplink carries *one* flow")
    assert len(good.loads) == 20  # each direction of ten cables
    assert all(load == pytest.approx(1) for load in good.loads.values())
    said("all eight hops of the ring lead through the spine, four flows share each uplink")
    for number, load in bad.loads.items():
        ends = hall.ends(number)
        assert load == pytest.approx(1 if "spine" in ends else 1 / 4)
        if "spine" in ends:
            assert sum(number in flow.links for flow in bad.moving) == 4


def test_the_file_of_the_chapter_runs_on_the_command_line(tmp_path: Path) -> None:
    said("`dtlab simulate all_reduce --topology closet.yaml`")
    (text,) = re.findall(r'text = """(.*?)"""', CHAPTER.code_with('text = """'), flags=re.S)
    (tmp_path / "closet.yaml").write_text(text)
    done = CliRunner().invoke(app, ["simulate", "all_reduce", "--topology",
                                    str(tmp_path / "closet.yaml")])
    assert done.exit_code == 0, done.output
    assert "ring" in done.output


# ---- what breaks -------------------------------------------------------------------------------


def test_in_the_fat_tree_all_could_send_at_full_speed_and_only_one_does() -> None:
    said("only one of the eight gets its full speed")
    fat = fat_tree(4)
    levels: dict[tuple[str, str], float] = {}
    for number, capacity_Bps in enumerate(fat.capacity_Bps):
        a, b = (re.sub(r"\d", "", str(end)) for end in fat.ends(number))
        levels[a, b] = levels.get((a, b), 0.0) + capacity_Bps
    assert len(set(levels.values())) == 1  # each level is as wide as all hosts
    trace = simulate(send_together, {(s, s + 8): GB for s in range(8)}, network=fat).trace
    times = np.array([m.end_s for m in trace.transfers]) / (GB / 12.5e9)
    assert sorted(times) == pytest.approx([1] + [2] * 7, rel=1e-3)
    met = [set(pairwise(fat.path(s, s + 8)[1:-1])) for s in range(8)]  # as the cell prints them
    assert [sum(bool(mine & other) for other in met) for mine in met] == [2, 2, 2, 2, 1, 2, 2, 3]
    used = {link for flow in replay(fat, trace)[-1].moving for link in flow.links}
    between = {n for n in range(len(fat.capacity_Bps))
               if all(isinstance(end, str) for end in fat.ends(n))}
    assert between - used


def test_a_neighbour_makes_it_three_times_as_long() -> None:
    said("it takes three times as long")
    alone, beside = map(float, re.findall(r": ([\d.]+) s", printed("neighbour")))
    assert beside == pytest.approx(3 * alone)


def test_incast_is_bound_by_the_receivers_own_cable() -> None:
    said("12.8 s. The narrowest link is the receiver's own")
    flows = {(server, 0): GB for server in range(1, 17)}
    for ratio in (1.0, 0.1):  # a spine ten times as fast
        hall = racks(17, 1, oversubscription=ratio, latency_s=0, bandwidth_Bps=TEN_GIGABIT_BPS)
        assert elapsed_s(hall, flows) == pytest.approx(12.8)


def test_a_hash_costs_an_exchange_on_a_fat_tree_a_factor_of_two_and_d_mod_k_nothing() -> None:
    scope: dict[str, object] = {"torch": torch, "collectives": collectives, "topology": topology,
                                "simulate": simulate}
    exec(CHAPTER.code_with("def exchange_all").split("\n\n\nfor")[0], scope)

    def over_full_speed(k: int, routing: str) -> float:
        cluster = fat_tree(k, routing=routing)
        full_s = (cluster.ranks - 1) * 10e6 / 12.5e9
        run = simulate(scope["exchange_all"], network=cluster, trace=False)  # type: ignore[arg-type]
        return run.elapsed_s / full_s

    said("cost more than a factor of two; on 128 hosts it is three")
    assert 2 < over_full_speed(4, "hash") < 2.5
    assert 2.9 < over_full_speed(8, "hash") < 3.2
    said("With D-mod-k no two flows of such a step ever meet")
    for k in (4, 8):
        assert over_full_speed(k, "d_mod_k") == pytest.approx(1, abs=0.01)


def test_the_newer_sheets_add_both_directions_up() -> None:
    said("900 GB/s of NVLink, which is 18 links of 25 GB/s in each direction")
    assert 2 * 18 * 25 == 900
    said("1.8 TB/s of NVLink, 18 links of 50 GB/s in each direction")
    assert 2 * 18 * 50 == 1800
    said("“130 TB/s” (NVIDIA, *GB200 NVL72*): 72 times 1.8")
    assert round(72 * 1.8) == 130
    said("the network card of a GPU carries 400 or 800 Gb/s, 50 or 100 GB/s")
    assert [bandwidth_of(f"{speed}Gb/s") / 1e9 for speed in (400, 800)] == [50, 100]


# ---- footnotes ---------------------------------------------------------------------------------


def test_two_senders_and_one_receiver_are_incast_not_oversubscription() -> None:
    said("1.6 s, whether the uplink is oversubscribed or not")
    assert re.findall(r"(\d):1, to 2 and (\d): ([\d.]+) s", printed("incast")) == [
        ("2", "2", "1.6"), ("2", "3", "1.6"), ("1", "2", "1.6"), ("1", "3", "0.8")]


def test_sockets_take_three_to_five_and_seven_to_fourteen_times_as_long_as_rdma() -> None:
    said("three to five times as long if they are large, seven to fourteen times if they are")
    rows = re.findall(r"4 kB: +([\d.]+) µs; .*1 GB: +([\d,.]+) µs;", printed("stacks"))
    small, large = ([float(us.replace(",", "")) for us in column]
                    for column in zip(*rows, strict=True))
    for (rdma, *slower), low, high in ((large, 3, 4.8), (small, 6.8, 14)):
        assert [us / rdma for us in slower] == pytest.approx([low, high], rel=0.04)


def test_one_message_does_not_feel_the_cable_between_the_cpus_and_four_do() -> None:
    said("9.6 billion transfers a second of 2 bytes, **19.2 GB/s** in each direction")
    assert 9.6 * 2 == 19.2
    plain, pairs = topology.v100_nvlink("pcie"), [(0, 5), (1, 4), (2, 7), (3, 6)]
    assert not [pair for pair in pairs if plain.graph().has_edge(*pair)]
    alone, *_, all_four = map(float, re.findall(r"QPI +([\d.]+) ms", printed("qpi")))
    assert alone == pytest.approx(125 / 16, rel=0.01)
    said("26 ms")
    assert all_four == pytest.approx(500 / 19.2, rel=0.01)


def test_four_gpus_want_more_lanes_than_a_desktop_cpu_has() -> None:
    said("A GPU wants 16 lanes, and a desktop CPU has 24")
    said("Four GPUs would want 64")
    assert 4 * 16 == 64 > 24 == 16 + 4 + 4
    lane_GBps = 16 * 128 / 130 / 8
    said("each gets 4 lanes, 7.9 GB/s with PCIe 4.0")
    assert round(4 * lane_GBps, 1) == round(16 * lane_GBps / 4, 1) == 7.9
    assert round(16 * lane_GBps, 1) == 31.5
