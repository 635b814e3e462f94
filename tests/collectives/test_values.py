"""Every algorithm gives what one process would compute: any ranks, root, op, dtype, any tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

import dtlab
from dtlab import Comm, collectives, run, simulate, topology
from tests import oracle


def net(p: int) -> topology.Topology:
    return topology.uniform(p, 1e-6, 1e9)


def simulated(p: int, fn: Any) -> list[Any]:
    return simulate(fn, network=net(p), echo=False).values


def check(collective: str, algorithm: str, p: int, n: int, root: int, op: str,
          dtype: torch.dtype, values: list[torch.Tensor]) -> None:
    want = oracle.expected(collective, [oracle.given(r, n, dtype) for r in range(p)], root, op)
    for got, wanted in zip(values, want, strict=True):
        oracle.assert_close(got, wanted, p)
    if collective == "all_reduce":  # not a bit of difference between ranks
        assert all(torch.equal(value, values[0]) for value in values)


@drawn(st.data())
def test_any_ranks_size_root_op_and_dtype(data: st.DataObject) -> None:
    collective, algorithm = data.draw(st.sampled_from(oracle.MOVING))
    p, n = data.draw(st.sampled_from(oracle.RANKS)), data.draw(st.integers(0, 40))
    root, op = data.draw(st.integers(0, p - 1)), data.draw(st.sampled_from(oracle.OPS))
    dtype = data.draw(st.sampled_from([d for d in oracle.DTYPES if oracle.is_defined(op, d)]))
    values = simulated(p, lambda comm: oracle.call(
        comm, collective, algorithm, oracle.given(comm.rank, n, dtype), root, op))
    check(collective, algorithm, p, n, root, op, dtype, values)


GLOO_CASES = [(n, root, op, dtype) for n, root, op, dtype in (
    (0, 0, "sum", torch.float32), (1, 0, "sum", torch.float64), (10, -1, "avg", torch.float32),
    (37, 0, "max", torch.int32), (8, -1, "prod", torch.complex64), (5, 0, "min", torch.bfloat16),
    (9, -1, "sum", torch.bool), (19, 0, "sum", torch.int64), (1, -1, "sum", torch.int64),
)]


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])  # in the simulator, above and beside: all of RANKS
def test_on_real_processes(p: int) -> None:
    """One run holds all algorithms and cases, for starting ranks takes longer than the work."""
    def fn(comm: Comm) -> list[torch.Tensor]:
        return [
            oracle.call(comm, collective, algorithm, oracle.given(comm.rank, n, dtype),
                        root % comm.size, op)
            for collective, algorithm in oracle.ALGORITHMS for n, root, op, dtype in GLOO_CASES
        ]

    by_rank = run(fn, ranks=p, trace=False, echo=False).values
    cases = [(c, a, *case) for c, a in oracle.ALGORITHMS for case in GLOO_CASES]
    for number, (collective, algorithm, n, root, op, dtype) in enumerate(cases):
        if collective != "barrier":
            check(collective, algorithm, p, n, root % p, op, dtype,
                  [values[number] for values in by_rank])


def test_torch_distributed_gives_the_same() -> None:
    """The peer everyone trusts, in the same processes."""
    def fn(comm: Comm) -> list[tuple[torch.Tensor, torch.Tensor]]:
        import torch.distributed as dist

        pairs = []
        for op, theirs in (("sum", dist.ReduceOp.SUM), ("prod", dist.ReduceOp.PRODUCT),
                           ("max", dist.ReduceOp.MAX), ("min", dist.ReduceOp.MIN)):
            for algorithm in collectives.ALGORITHMS["all_reduce"]:
                x, y = (oracle.given(comm.rank, 23, torch.float64) for _ in range(2))
                dist.all_reduce(y, theirs)
                pairs.append((collectives.all_reduce(comm, x, op, algorithm), y))
        for root in range(comm.size):
            x, y = (oracle.given(comm.rank, 23) for _ in range(2))
            dist.broadcast(y, root)
            pairs.append((collectives.broadcast(comm, x, root), y))
        for algorithm in collectives.ALGORITHMS["all_gather"]:
            x, y = oracle.given(comm.rank, 23), torch.empty(comm.size, 23)
            dist.all_gather(list(y), x)
            pairs.append((collectives.all_gather(comm, x, algorithm), y))
        for algorithm in collectives.ALGORITHMS["all_to_all"]:
            x = oracle.pieces_of(oracle.given(comm.rank, 23), comm.size)
            y = torch.empty_like(x)
            dist.all_to_all_single(y, x)
            pairs.append((collectives.all_to_all(comm, x, algorithm), y))
        for algorithm in collectives.ALGORITHMS["reduce_scatter"]:
            x = oracle.pieces_of(oracle.given(comm.rank, 23), comm.size)
            y = torch.empty_like(x[0])
            dist.reduce_scatter_tensor(y, x.flatten())
            pairs.append((collectives.reduce_scatter(comm, x, algorithm=algorithm), y))
        return pairs

    for pairs in run(fn, ranks=3, echo=False).values:
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs)


def strange_tensors() -> dict[str, torch.Tensor]:
    grid = torch.arange(12.0).reshape(3, 4)
    return {
        "transposed": grid.clone().T, "every other": torch.arange(10.0)[::2],
        "no dimension": torch.tensor(2.5), "no element": torch.empty(3, 0, 2),
        "a parameter": torch.nn.Parameter(torch.arange(5.0)),
        "four dimensions": torch.arange(16.0).reshape(2, 2, 2, 2),
        "a column": grid.clone()[:, 1], "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "channels last": torch.arange(24.0).reshape(1, 2, 3, 4).to(
            memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("kind", strange_tensors())
@pytest.mark.parametrize(("collective", "algorithm"), oracle.MOVING)
def test_any_tensor_is_changed_in_place_and_returned_or_left_as_it_was(
    collective: str, algorithm: str, kind: str
) -> None:
    in_place = (collective, algorithm) in oracle.IN_PLACE

    def fn(comm: Comm) -> tuple[bool, torch.Tensor, Any]:
        x = strange_tensors()[kind]
        with torch.no_grad():
            x *= comm.rank + 1
        result = oracle.call(comm, collective, algorithm, x, 2)
        return result is x, x.detach(), x.detach() if in_place else result

    parts = [strange_tensors()[kind].detach() * (rank + 1) for rank in range(3)]
    wanted = oracle.expected(collective, parts, 2)
    for (same, x, got), part, want in zip(simulated(3, fn), parts, wanted, strict=True):
        assert same == in_place
        assert in_place or torch.equal(x, part)
        oracle.assert_close(got, want, 3)


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS["all_to_all"])
@pytest.mark.parametrize("parts", [
    torch.arange(3.0)[None].T, torch.empty(3, 0, 2)[..., 0],  # contiguous, in steps of 3 and of 2
    torch.arange(3.0).mul(1 + 2j)[:, None].conj(),
    torch.arange(2.0)[::2]])  # one number alone may have any step
def test_parts_may_lie_in_memory_in_any_way(parts: torch.Tensor, algorithm: str) -> None:
    values = simulated(len(parts), lambda comm: collectives.all_to_all(
        comm, parts, algorithm, out=torch.empty(parts.shape, dtype=parts.dtype)).tolist())
    assert values == [[row] * len(parts) for row in parts.tolist()]


def test_a_slice_is_reduced_and_its_neighbours_are_left_alone() -> None:
    def fn(comm: Comm) -> torch.Tensor:
        x = torch.ones(10)
        collectives.all_reduce(comm, x[3:6])
        return x

    assert simulated(4, fn)[2].tolist() == [1.0] * 3 + [4.0] * 3 + [1.0] * 4


@pytest.mark.parametrize(("shape", "strides", "fits"), [
    ((2, 3), (2, 1), False), ((3, 2), (1, 2), False), ((3, 3), (1, 1), False),
    ((3, 2), (0, 1), False), ((2, 3), (3, 1), True), ((2, 2), (3, 2), True),
    ((3, 1, 2), (4, 0, 2), True), ((2, 0), (0, 0), True),
])
def test_elements_that_share_memory_are_refused(shape: Any, strides: Any, fits: bool) -> None:
    def fn(comm: Comm) -> list[Any]:
        x = torch.arange(12.0).as_strided(shape, strides)
        return collectives.broadcast(comm, x * 2 if comm.rank == 0 and fits else x).tolist()

    if fits:
        assert simulated(2, fn)[1] == (2 * torch.arange(12.0).as_strided(shape, strides)).tolist()
    else:
        with pytest.raises(dtlab.ShapeMismatch, match="elements share memory"):
            simulated(2, fn)


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS["scatter"])
def test_the_root_may_receive_its_part_over_another_ranks(algorithm: str) -> None:
    def fn(comm: Comm) -> list[float]:
        parts = torch.arange(5.0)[:, None].clone() if comm.rank == 0 else None
        x = torch.zeros(1) if parts is None else parts[2]
        return collectives.scatter(comm, parts, x, algorithm=algorithm).tolist()

    assert simulated(5, fn) == [[0.0], [1.0], [2.0], [3.0], [4.0]]


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS["all_reduce"])
def test_zeros_with_a_sign_and_nans_have_the_same_bits_on_all_ranks(
    algorithm: str, op: str
) -> None:
    """Of 0.0 and −0.0, and of two NaNs, torch takes one that depends on the operands' order."""
    def fn(comm: Comm) -> list[int]:
        nan = torch.tensor([0x7FC00001 + comm.rank] * 8, dtype=torch.int32).view(torch.float32)
        zero = torch.full((8,), -0.0 if comm.rank % 3 == 1 else 0.0)
        x = torch.cat([nan, zero])
        return collectives.all_reduce(comm, x, op, algorithm).view(torch.int32).tolist()

    values = simulated(6, fn)
    assert values == [values[0]] * 6


def test_nan_reaches_every_rank() -> None:
    for op in ("sum", "max", "min", "avg"):
        values = simulated(3, lambda comm, op=op: collectives.all_reduce(
            comm, torch.tensor([float("nan") if comm.rank == 1 else 1.0, 2.0]), op))
        assert all(value[0].isnan() and not value[1].isnan() for value in values)


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS["all_reduce"])
def test_op_may_be_a_function_of_two_tensors(algorithm: str) -> None:
    def larger_magnitude(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.where(a.abs() >= b.abs(), a, b)

    values = simulated(5, lambda comm: collectives.all_reduce(
        comm, torch.tensor([(-1.0) ** comm.rank * comm.rank, 7.0]), larger_magnitude, algorithm))
    assert all(value.tolist() == [4.0, 7.0] for value in values)


@pytest.mark.parametrize(("collective", "algorithm"), oracle.ALGORITHMS)
def test_tensors_without_data_take_the_same_time_and_messages(
    collective: str, algorithm: str
) -> None:
    def fn(comm: Comm, device: str) -> torch.Tensor:
        return oracle.call(comm, collective, algorithm, torch.zeros(37, device=device))

    real, empty = (simulate(fn, device, network=net(6)) for device in ("cpu", "meta"))
    assert all(x is None or x.is_meta for x in empty.values)
    assert [m[:7] for m in real.trace.transfers] == [m[:7] for m in empty.trace.transfers]


def test_a_barrier_holds_everyone_until_the_last_has_come() -> None:
    for algorithm in collectives.ALGORITHMS["barrier"]:
        def fn(comm: Comm, algorithm: str = algorithm) -> float:
            with comm.compute("late", seconds=float(comm.rank == 3) * 5):
                pass
            collectives.barrier(comm, algorithm)
            return comm.now()

        for p in (4, 5, 7, 13):
            assert min(simulated(p, fn)) >= 5.0
