"""What chapter 07 says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
import torch

from dtlab import Comm, Recv, Send, cost, ps, simulate
from dtlab.collectives import all_reduce
from dtlab.models import MLP, digits
from dtlab.ps.gpu_placement import gpus_and_cpu, sum_on_gpus
from dtlab.ps.partition import Spec
from dtlab.recording import placements
from dtlab.result import Result
from dtlab.topology import compose, link_bytes, uniform
from dtlab.trace import Trace
from tests.notebooks.chapter import Chapter

S, B = 160_000_000, 16e9
RANKS = [*range(1, 10), 13]
printed = Chapter("07").printed


def summed(where: str, switches: int = 1) -> Result:
    def gradients(comm: Comm) -> None:
        sum_on_gpus(comm, torch.empty(S // 4, device="meta"), where)

    return simulate(gradients, network=gpus_and_cpu(4, switches, B))


# ---- section 1: the store ----------------------------------------------------------------------


def train(comm: Comm, steps: int, images: int) -> dict[str, torch.Tensor] | None:
    """As in the chapter."""
    model, (training, _) = MLP((64, 32, 10)), digits(torch.float64)
    node = ps.join(comm, servers=1, update=ps.SGD(lr=0.5))
    if node.is_server:
        node.serve()
        return None
    node.init(model.parameters(dtype=torch.float64))
    for step in range(steps):
        weights = node.pull(["w0", "b0", "w1", "b1"])
        mine = training.batch(step, images).shard(comm.rank - 1, comm.size - 1)
        node.push(model.gradients(weights, *mine)[1])
        node.clock()
    found = node.pull(["w0", "b0", "w1", "b1"])
    node.finish()
    return found


def test_equal_shards_agree_with_one_process_and_unequal_ones_would_not(prose: str) -> None:
    assert "They agree, within rounding" in prose
    assert "as the shards are equal in size" in prose
    model, (training, _) = MLP((64, 32, 10)), digits(torch.float64)
    assert training.x.shape == (1500, 64)
    for images in (60, 61):
        one = model.parameters(dtype=torch.float64)
        grads = model.gradients(one, *training.batch(0, images))[1]
        one = {key: w - 0.5 * grads[key] for key, w in one.items()}
        found = simulate(train, 1, images, network=uniform(3, 1e-6, 1e9)).values[1]
        apart = max(float((found[key] - one[key]).abs().max()) for key in one)
        assert apart < 1e-12 if images == 60 else apart > 1e-6


# ---- sections 2 and 3: where the servers live --------------------------------------------------


def test_60_80_and_15_milliseconds(prose: str) -> None:
    """Of GPU 0, the CPU, all GPUs, and a ring. tests/ps/test_placement.py has the seconds, too."""
    for words in ("60, 80 and 15 ms", "The ring takes 15 ms as well", "The ring stays at 15 ms",
                  "its time halves to 40 ms. The spread servers slow down to 20 ms",
                  "GPU 0 | 60 ms", "the CPU | 80 ms", "all GPUs | 15 ms"):
        assert words in prose
    one, two = ([float(ms) for ms in re.findall(r"([\d.]+) ms", printed(name))]
                for name in ("where-simulated", "two-switches"))
    assert (one, two) == ([60, 80, 15, 15], [60, 40, 20, 15])


def test_the_same_bytes_in_a_quarter_of_the_time(prose: str) -> None:
    assert "a quarter of GPU 0's time with the very same 960 MB" in prose
    gpu_0, spread = summed("on GPU 0"), summed("spread over the GPUs")
    assert gpu_0.trace.sent_bytes() == spread.trace.sent_bytes() == 960_000_000
    assert gpu_0.elapsed_s == pytest.approx(4 * spread.elapsed_s)
    assert "(240 MB each way on the busiest link instead of 480)" in prose
    assert placements(4, S, B).runs["on GPU 0"].busiest == 480_000_000
    assert placements(4, S, B).runs["spread over the GPUs"].busiest == 240_000_000
    assert placements(4, S, B).runs["in a ring, no server"].busiest == 240_000_000


def test_first_all_gradients_come_in_and_only_then_sums_go_out(prose: str) -> None:
    assert "first all gradients come in, and only then sums go out" in prose

    def one_direction_at_a_time(trace: Trace) -> bool:
        into = [t for t in trace.transfers if t.dst == 0]
        out = [t for t in trace.transfers if t.src == 0]
        return max(t.end_s for t in into) <= min(t.start_s for t in out)

    assert one_direction_at_a_time(summed("on GPU 0").trace)
    assert not one_direction_at_a_time(summed("spread over the GPUs").trace)


# ---- section 4: m workers, n servers -----------------------------------------------------------


def test_one_server_takes_o_of_m_and_more_than_m_gain_nothing(prose: str) -> None:
    assert "From n = m on, each worker's own port is full" in prose
    assert "more servers gain nothing beyond 2·S/B, here 20 ms" in prose
    for m, n in itertools.product(RANKS, RANKS):
        seconds = cost.parameter_server_s(m, n, S, B)
        assert seconds == pytest.approx(2 * S / B if n >= m else m / n * 2 * S / B)
        assert seconds >= 2 * S / B == 0.020
    assert "with twice the workers, push and pull take twice as long" in prose
    assert cost.parameter_server_s(16, 1, S, B) == 2 * cost.parameter_server_s(8, 1, S, B)
    assert "15 ms that four workers needed in section 3 (eight would need 17.5)" in prose
    for m, ms in ((4, 15), (8, 17.5)):  # out of each worker 1/m of S to each other one, twice
        assert 2 * (m - 1) / m * S / B == pytest.approx(ms * 1e-3)


@pytest.mark.parametrize("m", [2, 4, 8])
def test_a_worker_that_pulls_one_block_while_it_pushes_the_next_needs_about_half(
    prose: str, m: int
) -> None:
    """m servers, m workers; in each step a worker exchanges with another server."""
    assert "needs (1 + 1/32)·S/B, 10.3 ms" in prose
    blocks = 32

    def overlapped(comm: Comm) -> None:
        part = torch.empty(int(S) // (m * blocks), dtype=torch.uint8, device="meta")
        is_server = comm.rank < m
        for step in range(m * (blocks + 1)):
            peer = m + (comm.rank - step) % m if is_server else (comm.rank - m + step) % m
            pushed, pulled = step < m * blocks, step >= m
            arrives, leaves = (pushed, pulled) if is_server else (pulled, pushed)
            comm.exchange(*[Send(part, peer)] * leaves, *[Recv(part, peer)] * arrives)

    elapsed_s = simulate(overlapped, network=uniform(2 * m, 1e-9, B)).elapsed_s
    assert elapsed_s == pytest.approx((1 + 1 / blocks) * S / B, rel=1e-4)
    assert f"{elapsed_s * 1e3:.1f}" == "10.3"


# ---- section 5: who holds what -----------------------------------------------------------------


def owners(partition: ps.Partition, sizes: dict[str, int], servers: int) -> list[int]:
    """Of each element."""
    specs = {key: Spec((n,), torch.float32) for key, n in sizes.items()}
    return [server for pieces in partition.place(specs, range(servers)).values()
            for server, elements in pieces for _ in range(len(elements))]


def test_a_hash_puts_a_huge_key_somewhere_whole(prose: str) -> None:
    """That it shares many keys and that a range cuts a huge one: tests/ps/test_partition.py."""
    assert "a hash can only put it somewhere whole" in prose
    assert "about three and a half times its part to do" in prose
    huge = {"embedding": 8_000} | {f"layer {i}": 50 for i in range(40)}
    for partition in (ps.Hash(), ps.ConsistentHash()):
        held = Counter(owners(partition, huge, 4))
        assert max(held.values()) >= 8_000
    assert max(Counter(owners(ps.Hash(), huge, 4)).values()) / 2_500 == pytest.approx(3.5, abs=0.1)


def test_what_a_fifth_server_moves(prose: str) -> None:
    """A hash of either kind, for any number of servers: test_claims_09.py."""
    assert "a hash moves four fifths of the keys, a range half of all bytes" in prose
    assert "`ConsistentHash` moves about that, and no more" in prose
    rows = {f"row {i}": 10 for i in range(1_000)}
    before, after = (owners(ps.Range(), rows, servers) for servers in (4, 5))
    moved = sum(a != b for a, b in zip(before, after, strict=True))
    assert moved / 10_000 == pytest.approx(1 / 2, abs=0.08)


# ---- section 6: all-reduce is a special case ---------------------------------------------------


def test_servers_everywhere_equal_an_all_reduce(prose: str) -> None:
    """For other sizes and numbers of ranks: tests/ps/test_placement.py."""
    assert "Together they are an all-reduce" in prose
    assert printed("special-run").count("all equal: True") == 5


@pytest.mark.parametrize("p", [2, 3, 4, 8, 13])
def test_the_same_bytes_and_messages_and_less_latency_than_a_ring(prose: str, p: int) -> None:
    assert "The same bytes and the same number of messages" in prose
    assert "posted together: while one starts, the bytes of the others flow" in prose
    n, alpha = 4 * 5040 * 13, 20e-6

    def by_servers(comm: Comm) -> None:
        ps.aggregate(comm, torch.empty(n // 4, device="meta"), "spread")

    def by_ring(comm: Comm) -> None:
        all_reduce(comm, torch.empty(n // 4, device="meta"), algorithm="ring")

    ours, ring = (simulate(way, network=uniform(p, alpha, B)) for way in (by_servers, by_ring))
    bytes_s = 2 * (p - 1) / p * n / B
    part_s = n / p / B
    each_way_s = alpha + part_s + (p - 2) * max(alpha, part_s)
    assert ours.elapsed_s == pytest.approx(2 * each_way_s, rel=1e-3)
    assert ring.elapsed_s == pytest.approx(2 * (p - 1) * alpha + bytes_s, rel=1e-3)
    for rank in range(p):
        assert ours.trace.messages(rank) == ring.trace.messages(rank) == 2 * (p - 1)
        assert abs(ours.trace.sent_bytes(rank) - ring.trace.sent_bytes(rank)) <= 8 * p
    assert "p(p−1) messages are posted at the same time" in prose
    assert sum(t.sent_s == 0 for t in ours.trace.transfers) == p * (p - 1)


# ---- section 7: two levels, trees --------------------------------------------------------------

def test_two_levels_let_4_s_of_16_s_cross(prose: str) -> None:
    """Sums of the three: tests/ps/test_placement.py; `shared` is made of collectives."""
    assert "10 Gb/s, that is 1.25 GB/s" in prose
    rows = re.findall(r"(\d+) ms +cards send ([\d.]+) S, ([\d.]+) S, ([\d.]+) S",
                      printed("two-compare") + printed("two-shared"))
    (one_ms, *one), (two_ms, *two), (shared_ms, *shared) = (map(float, row) for row in rows)
    assert "Between machines, 4 S are left of 16 S" in prose
    assert (sum(one), sum(two)) == (16, 4)
    assert "Four leave the second machine, and one would be enough" in prose
    assert (one[1], two[1]) == (4, 1)
    assert "then eight answers on their way out: its 8 S" in prose
    assert one[0] == 8
    assert "still carries twice as much as the others" in prose
    assert two == [2, 1, 1]
    assert "The network carries as many bytes as before; but no card carries more than" in prose
    assert shared == [1.33] * 3
    assert shared_ms < two_ms < one_ms


@pytest.mark.parametrize("machines", [2, 3, 5])
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_2_s_a_machine_instead_of_2_s_a_worker(prose: str, machines: int, gpus: int) -> None:
    assert "2S a machine instead of 2S a worker" in prose
    cluster = compose(gpus_and_cpu(gpus), uniform(machines, 0.0, 1.25e9), nic_at="cpu")
    ranks = [[m * (gpus + 1) + gpus, *range(m * (gpus + 1), m * (gpus + 1) + gpus)]
             for m in range(machines)]

    def leveled(comm: Comm) -> None:
        ps.aggregate(comm, torch.empty(1000, device="meta"), "two_level", machines=ranks)

    crossed = link_bytes(cluster, simulate(leveled, network=cluster).trace)
    total = sum(nbytes for (_, to), nbytes in crossed.items() if to == "switch")
    assert total == 2 * 4000 * (machines - 1)  # the first machine has the server at home


def test_a_tree_grows_with_its_levels_and_spreading_beats_it_on_equal_wires(prose: str) -> None:
    assert "Its time grows with the number of levels, not of workers" in prose
    assert "On equal wires, spreading wins" in prose

    def summed_by(comm: Comm, placement: str) -> None:
        ps.aggregate(comm, torch.empty(1_000_000, device="meta"), placement)

    rows = re.findall(r"server +([\d.]+) ms, tree +([\d.]+) ms, spread over all ([\d.]+) ms",
                      printed("tree"))
    star, tree, spread = zip(*(map(float, row) for row in rows), strict=True)  # 4, 16, 64 workers
    assert all(c < b < a for a, b, c in zip(star, tree, spread, strict=True))
    assert tree[2] - tree[1] == tree[1] - tree[0]  # two levels each
    assert "a binary tree of depth d takes at most 3d·α, and spreading 2(p−1)·α" in prose
    assert "short vectors, where latency decides: p·α, against 2(p−1)·α" in prose
    for ranks in range(2, 32):
        depth, full = ranks.bit_length() - 1, ranks & (ranks + 1) == 0
        network = uniform(ranks, 1.0, 1e15)  # only latency counts
        star, tree, spread = (simulate(summed_by, placement, network=network).elapsed_s
                              for placement in ("on_one", "tree", "spread"))
        assert star == pytest.approx(ranks)
        assert spread == pytest.approx(2 * (ranks - 1))
        assert tree == pytest.approx(3 * depth) if full else tree < 3 * depth


# ---- section 8: the order ----------------------------------------------------------------------


def test_2_to_the_24_plus_one_plus_one(prose: str) -> None:
    assert "(2²⁴ + 1) + 1 is 2²⁴, and 2²⁴ + (1 + 1) is 2²⁴ + 2" in prose
    big, one = torch.tensor(2.0**24), torch.tensor(1.0)
    assert (big + one) + one == big
    assert (big + (one + one)).item() == 2**24 + 2
    assert "0, 1 or 2, as it happens" in prose
    numbers = [big, one, one, -big]
    found = {(((a + b) + c) + d).item() for a, b, c, d in itertools.permutations(numbers)}
    assert found == {0.0, 1.0, 2.0}


def test_the_server_adds_in_the_order_of_arrival_and_a_ring_in_the_order_of_ranks(
    prose: str,
) -> None:
    assert "A ring adds in an order that is fixed by its ranks" in prose
    numbers = [2.0**24, 1.0, 1.0, -(2.0**24)]

    def step(comm: Comm, seconds: list[int]) -> float | None:
        node = ps.join(comm, servers=1, update=ps.SGD(lr=1.0))
        if node.is_server:
            node.serve()
            return None
        node.init({"w": torch.zeros(1)})
        with comm.compute("backward", seconds=seconds[comm.rank - 1]):
            pass
        node.push({"w": torch.tensor([numbers[comm.rank - 1]])})
        node.clock()
        w = node.pull(["w"])["w"].item()
        node.finish()
        return w

    def ring(comm: Comm, seconds: list[int]) -> list[float]:
        with comm.compute("backward", seconds=seconds[comm.rank]):
            pass
        return all_reduce(comm, torch.full((8,), numbers[comm.rank]), algorithm="ring").tolist()

    rings = []
    for seconds in itertools.permutations(range(1, 5)):
        _, *found = simulate(step, list(seconds), network=uniform(5, 1e-6, 1e9)).values
        arrived = [numbers[i] for i in sorted(range(4), key=seconds.__getitem__)]
        total = torch.tensor(0.0)
        for number in arrived:
            total = total + number
        assert found == [-total.item() / 4] * 4
        rings.append(simulate(ring, list(seconds), network=uniform(4, 1e-6, 1e9)).values)
    assert all(values == rings[0] for values in rings)


# ---- section 11: the equation, and the places --------------------------------------------------


def test_the_double_sum_holds_key_by_key_and_in_any_order(prose: str) -> None:
    assert "no key depends on another" in prose
    assert "with whole numbers, and three keys all together or one at a time" in prose
    assert printed("equation-run").count("on all 15 ranks: True") == 2
