"""Every algorithm in the registry against one definition of its collective, on whole numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import dtlab
from dtlab import collectives, cost, simulate, topology
from dtlab.collectives import ALGORITHMS
from tests import oracle

ROOTED = ("broadcast", "reduce", "scatter", "gather")
IN_PIECES = ("scatter", "gather", "all_gather", "reduce_scatter", "all_to_all")
ALPHA, BETA, GAMMA = 1e-5, 1e-9, 3e-9


def inputs(p: int, n: int) -> torch.Tensor:
    """parts[r, s]: what rank r holds for rank s; rank r's own vector is parts[r, 0]."""
    generator = torch.Generator().manual_seed(1000 * p + n)
    return torch.randint(-9, 10, (p, p, n), generator=generator)


def call(comm: dtlab.Comm, collective: str, algorithm: str, parts: torch.Tensor, root: int) -> Any:
    mine = parts[comm.rank]
    return oracle.call(comm, collective, algorithm, mine[0].clone(), root, pieces=mine)


def assert_right(collective: str, values: list[Any], parts: torch.Tensor, root: int) -> None:
    wanted = oracle.expected(collective, list(parts[:, 0]), root, pieces=parts)
    for rank, (value, want) in enumerate(zip(values, wanted, strict=True)):
        assert torch.equal(value, want) if want is not None else value is None, (rank, value, want)


@pytest.mark.parametrize(("collective", "algorithm"), oracle.ALGORITHMS)
def test_values_time_bytes_and_messages_are_those_of_the_closed_form(
    collective: str, algorithm: str
) -> None:
    for p in (*range(1, 10), 12, 13, 16, 17, 33):
        for n in (0, 5, 37) if p < 10 or p == 13 else (37,):
            parts = inputs(p, n)
            for root in {0, p // 2, p - 1} if collective in ROOTED else {0}:
                network = topology.uniform(p, ALPHA, 1 / BETA)
                result = simulate(call, collective, algorithm, parts, root,
                                  network=network, gamma=GAMMA)
                assert_right(collective, result.values, parts, root)
                nbytes = 8 * n * (p if collective in IN_PIECES else 1)
                form = cost.form(collective, algorithm, p, nbytes, itemsize=8)
                closed_s = cost.time_s(collective, algorithm, p, nbytes, ALPHA, BETA, GAMMA, 8)
                if form.exact:
                    assert math.isclose(result.elapsed_s, closed_s, rel_tol=1e-9, abs_tol=1e-15)
                else:
                    assert result.elapsed_s <= closed_s * (1 + 1e-9), (p, n)
                if root == 0:
                    sent = [result.trace.sent_bytes(rank) for rank in range(p)]
                    messages = [result.trace.messages(rank) for rank in range(p)]
                    assert sent == form.sent_bytes, (p, n)
                    assert messages == form.messages, (p, n)


@pytest.mark.parametrize(("collective", "algorithm"), oracle.ALGORITHMS)
def test_registered_functions_take_tensors_of_any_shape(collective: str, algorithm: str) -> None:
    if collective in ("barrier", "scatter", "reduce_scatter", "all_to_all"):
        return
    function = ALGORITHMS[collective][algorithm]

    def transposed(comm: dtlab.Comm) -> Any:
        x = (torch.arange(12).reshape(4, 3) + comm.rank).T  # not contiguous
        return function(comm, x)

    def straight(comm: dtlab.Comm) -> Any:
        return function(comm, torch.arange(12).reshape(4, 3).T.contiguous() + comm.rank)

    network = topology.uniform(5, ALPHA, 1 / BETA)
    for a, b in zip(simulate(transposed, network=network).values,
                    simulate(straight, network=network).values, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize(("collective", "algorithm"),
                         [(c, a) for c, a in oracle.ALGORITHMS if c in ("scan", "exscan")]
                         + [("all_reduce", "recursive_doubling")])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 6, 7, 8, 13])
def test_ranks_stay_in_order_under_an_operation_that_does_not_commute(
    collective: str, algorithm: str, p: int
) -> None:
    def compose(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Affine maps x ↦ m·x + c as pairs (m, c): first a, then b. Associative only."""
        return torch.stack([a[0] * b[0], a[1] * b[0] + b[1]])

    maps = torch.randint(-3, 4, (p, 2), generator=torch.Generator().manual_seed(p))

    def fn(comm: dtlab.Comm) -> torch.Tensor:
        return getattr(collectives, collective)(comm, maps[comm.rank].clone(), op=compose,
                                                algorithm=algorithm)

    values = simulate(fn, network=topology.uniform(p, ALPHA, 1 / BETA)).values
    for rank, value in enumerate(values):
        last = {"scan": rank, "exscan": rank - 1, "all_reduce": p - 1}[collective]
        want = maps[0]
        for other in maps[1 : last + 1]:
            want = compose(want, other)
        assert torch.equal(value, want), rank


@pytest.mark.parametrize("algorithm", list(ALGORITHMS["all_reduce"]))
@pytest.mark.parametrize("p", [*oracle.RANKS, 12])
def test_all_ranks_end_with_the_same_bits(algorithm: str, p: int) -> None:
    def fn(comm: dtlab.Comm) -> torch.Tensor:
        x = torch.randn(101, generator=torch.Generator().manual_seed(comm.rank))
        return collectives.all_reduce(comm, x, algorithm=algorithm)

    values = simulate(fn, network=topology.uniform(p, ALPHA, 1 / BETA)).values
    assert all(torch.equal(value, values[0]) for value in values)


@pytest.mark.parametrize(("algorithm", "options", "says"), [
    ("torus", {"shape": (3, 3)}, "3 × 3 doesn't fit 8"),
    ("hierarchical", {"group": 3}, "groups of 3"),
    ("two_ring", {"cycles": [[0, 1, 2, 3, 4, 5, 6, 6]]}, "no cycle"),
    ("ring", {"shape": (2, 4)}, "no option 'shape'"),
    ("torus", {"shape": 8}, "two whole numbers, not 8"), ("torus", {"shape": (2.0, 4)}, "2.0"),
    ("hierarchical", {"group": "2"}, "groups of '2'"),
    ("hierarchical", {"group": 0}, "groups of 0"),
    ("two_ring", {"cycles": []}, "at least one"), ("two_ring", {"cycles": [3]}, "3 is no cycle"),
    ("pipelined_ring", {"piece_bytes": 0}, "piece_bytes"),
    ("pipelined_ring", {"window": True}, "window"),
    ("double_tree", {"segments": 0}, "segments"),
])
def test_options_that_make_no_sense_are_named(algorithm: str, options: Any, says: str) -> None:
    def fn(comm: dtlab.Comm) -> None:
        collectives.all_reduce(comm, torch.ones(4), algorithm=algorithm, **options)

    with pytest.raises(dtlab.ConfigError, match=says):
        simulate(fn, network=topology.uniform(8, ALPHA, 1 / BETA))


@pytest.mark.parametrize(("algorithm", "options"), [
    ("torus", {"shape": (2, 4)}), ("torus", {"shape": (8, 1)}), ("hierarchical", {"group": 8}),
    ("two_ring", {"cycles": [[0, 1, 2, 3, 4, 5, 6, 7], [0, 3, 5, 2, 4, 7, 1, 6]]}),
    ("double_tree", {"segments": 1}),
    ("pipelined_ring", {"piece_bytes": 8}), ("pipelined_ring", {"piece_bytes": 16}),
    ("pipelined_ring", {"piece_bytes": 8, "window": 1}),
    ("pipelined_ring", {"piece_bytes": 8, "window": 99}),
])
def test_options_choose_another_way_to_the_same_sum(algorithm: str, options: Any) -> None:
    def fn(comm: dtlab.Comm) -> torch.Tensor:
        x = torch.arange(19) * (comm.rank + 1)
        return collectives.all_reduce(comm, x, algorithm=algorithm, **options)

    for value in simulate(fn, network=topology.uniform(8, ALPHA, 1 / BETA)).values:
        assert torch.equal(value, torch.arange(19) * 36)


@pytest.mark.parametrize("p", [2, 3, 5, 8])
@pytest.mark.parametrize("n", [3, 64, 1000, 10_000])
def test_a_pipelined_ring_starts_a_piece_while_the_one_before_still_flows(p: int, n: int) -> None:
    def fn(comm: dtlab.Comm) -> torch.Tensor:
        x = torch.arange(p * n * 4.0) * (comm.rank + 1)  # chunks of 4 pieces
        return collectives.all_reduce(comm, x, algorithm="pipelined_ring", piece_bytes=4 * n)

    result = simulate(fn, network=topology.uniform(p, ALPHA, 1 / BETA))
    pieces, s = 2 * (p - 1) * 4, 4 * n
    closed_s = ALPHA + s * BETA + (pieces - 1) * max(ALPHA, s * BETA)
    assert math.isclose(result.elapsed_s, closed_s, rel_tol=1e-9)
    assert torch.equal(result.values[p - 1], torch.arange(p * n * 4.0) * (p * (p + 1) // 2))


@pytest.mark.parametrize("p", [2, 3, 5, 8])
def test_a_pipelined_ring_adds_while_it_sends(p: int) -> None:
    """A piece takes a third of its time on the wire to add: of the additions, one remains."""
    def fn(comm: dtlab.Comm, algorithm: str) -> None:
        x = torch.empty(p * 4 * 100_000, device="meta")
        collectives.all_reduce(comm, x, algorithm=algorithm)

    s = 1_600_000 // 2  # pieces of at most 1 MiB
    gamma = BETA / 3
    pipelined, ring = (simulate(fn, algorithm, network=topology.uniform(p, ALPHA, 1 / BETA),
                                gamma=gamma).elapsed_s for algorithm in ("pipelined_ring", "ring"))
    rounds = 2 * (p - 1) * 2
    assert pipelined == pytest.approx((p - 1) * ALPHA + rounds * s * BETA + s * gamma)
    assert ring == pytest.approx(rounds / 2 * (ALPHA + 2 * s * BETA) + rounds / 2 * s * gamma)


def test_a_pipelined_ring_over_many_pieces_obeys_its_form() -> None:
    for p, nbytes in ((2, 10_000_004), (5, 12 << 20), (3, 7_654_320)):
        def fn(comm: dtlab.Comm, nbytes: int = nbytes) -> None:
            x = torch.empty(nbytes // 4, device="meta")
            collectives.all_reduce(comm, x, algorithm="pipelined_ring")

        for gamma in (0.0, GAMMA):
            result = simulate(fn, network=topology.uniform(p, ALPHA, 1 / BETA), gamma=gamma)
            asked = ("all_reduce", "pipelined_ring", p, nbytes)
            assert result.elapsed_s <= cost.time_s(*asked, ALPHA, BETA, gamma) * (1 + 1e-9)
            assert [result.trace.sent_bytes(r) for r in range(p)] == cost.sent_bytes(*asked)
            assert [result.trace.messages(r) for r in range(p)] == cost.messages(*asked)
