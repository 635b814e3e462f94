"""Ops by others' names, objects, uneven sums: right, or refused in one sentence, everywhere."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtlab
from dtlab import Comm, Recv, Send, collectives
from dtlab.topology import uniform

BACKENDS: dict[str, Callable[..., dtlab.Result]] = {
    "simulated": lambda fn, p: dtlab.simulate(fn, network=uniform(p, 1e-6, 1e9)),
    "processes": lambda fn, p: dtlab.run(fn, ranks=p, timeout=30),
}


@pytest.mark.parametrize(("op", "name"), [
    (dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.PRODUCT, "prod"), (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"), (dist.ReduceOp(dist.ReduceOp.SUM), "sum"), (sum, "sum"),
    (max, "max"), (min, "min"), (dist.ReduceOp.BAND, torch.bitwise_and),
    (dist.ReduceOp.BOR, torch.bitwise_or), (dist.ReduceOp.BXOR, torch.bitwise_xor),
    (dist.ReduceOp.AVG, "avg"),
])
def test_an_op_by_torchs_or_pythons_name_is_ours(op: Any, name: Any) -> None:
    def fn(comm: Comm) -> list[list[int]]:
        x = torch.tensor([comm.rank + 1, 3 - comm.rank]).to(
            torch.float64 if name == "avg" else torch.int64)
        parts = torch.stack([x] * comm.size)
        results = []
        for each in (op, name):
            one = x.clone()
            comm.accumulate_(one, x + 1, each)
            results.append([
                collectives.all_reduce(comm, x.clone(), each),
                collectives.all_reduce(comm, x.clone(), op=each),
                collectives.reduce(comm, x.clone(), 1, op=each),
                collectives.reduce_scatter(comm, parts, each),
                collectives.scan(comm, x.clone(), each),
                collectives.reduce_scatterv(comm, [x, x[:1], x], each), one])
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)
        return [result.tolist() for result in results[0][:2]]

    first, *others = BACKENDS["simulated"](fn, 3).values
    assert others == [first] * 2


@pytest.mark.parametrize(("op", "says"), [
    (lambda a, b: (a + b).sum(), "it returned a tensor of torch.float32 ()"),
    (lambda a, b: 3, "must return a tensor like the two it is given, torch.float32 (1,)"),
    (lambda a, b: (a + b)[None], "it returned a tensor of torch.float32 (1, 1)"),
    (lambda a, b: (a + b).double(), "torch.float64"),
    (dist.ReduceOp.PREMUL_SUM, "ReduceOp.PREMUL_SUM is not known here; choose one of sum, "),
])
def test_a_function_that_is_no_reduction_is_refused(op: Any, says: str) -> None:
    def fn(comm: Comm) -> None:
        collectives.all_reduce(comm, torch.ones(3), op=op)

    with pytest.raises(dtlab.ConfigError) as told:
        BACKENDS["simulated"](fn, 2)
    assert says in str(told.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_objects_go_everywhere(backend: str) -> None:
    def fn(comm: Comm) -> Any:
        me, p = comm.rank, comm.size
        mine = {"rank": me, "text": "x" * me}
        every = [{"rank": r, "text": "x" * r} for r in range(p)]
        assert collectives.all_gather_object(comm, mine) == every
        for root in range(p):
            assert collectives.broadcast_object(comm, mine if me == root else 7, root) == (
                every[root])
            assert collectives.gather_object(comm, mine, root) == (every if me == root else None)
            assert collectives.scatter_object(comm, every if me == root else None, root) == mine
            for op, total in ((operator.add, "012345"[:p]), (max, str(p - 1)), ("min", "0"),
                              (dist.ReduceOp.MAX, str(p - 1))):
                assert collectives.reduce_object(comm, str(me), op, root=root) == (
                    total if me == root else None)
        comm.send("plain", (me + 1) % p) if p > 1 and me == 0 else None
        if me == 1:
            assert comm.recv_object(0) == "plain"
        odd = torch.tensor(me, dtype=torch.uint16)  # torch can't read its own pickle of it
        assert list(map(int, collectives.all_gather_object(comm, odd))) == list(range(p))
        assert list(map(int, collectives.gather_object(comm, odd) or range(p))) == list(range(p))
        assert collectives.broadcast_object(comm, odd).item() == 0
        assert collectives.scatter_object(comm, [odd] * p if me == 0 else None).item() == 0

    for p in (1, 2, 5) if backend == "simulated" else (3,):
        BACKENDS[backend](fn, p)


def test_a_broadcast_of_an_object_takes_as_many_rounds_as_its_tree_is_high() -> None:
    def fn(comm: Comm) -> None:
        collectives.broadcast_object(comm, "x")

    for p in range(1, 10):
        result = dtlab.simulate(fn, network=uniform(p, 1.0, float("inf")))
        assert result.elapsed_s == (p - 1).bit_length()


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_sums_of_parts_of_different_sizes(p: int) -> None:
    def fn(comm: Comm) -> torch.Tensor:
        parts = [torch.full((r, 2), comm.rank + 10.0 * r) for r in range(comm.size)]
        before = [part.clone() for part in parts]
        result = collectives.reduce_scatterv(comm, parts)
        assert all(map(torch.equal, parts, before))
        return result

    for r, value in enumerate(BACKENDS["simulated"](fn, p).values):
        assert torch.equal(value, torch.full((r, 2), p * (p - 1) / 2 + 10.0 * r * p))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("call", "says"), [
    (lambda c: c.recv(torch.zeros(1).expand(3), 0) if c.rank else c.send(torch.ones(3), 1),
     "rank 1: can't receive into a tensor whose elements share memory"),
    (lambda c: c.recv(torch.zeros(1).expand(3)) if c.rank else c.send(torch.ones(3), 1),
     "rank 1: can't receive into a tensor whose elements share memory"),
    (lambda c: c.recv(torch.ones(4).unfold(0, 3, 1), 0) if c.rank else c.send(torch.eye(2, 3), 1),
     "rank 1: can't receive into a tensor whose elements share memory"),
    (lambda c: c.sendrecv(x := torch.ones(3), 1 - c.rank, x, 1 - c.rank),
     "receives into the tensor that it is sending"),
    (lambda c: c.post(Recv((x := torch.eye(3))[1], 1 - c.rank), Send(x[:, 1], 1 - c.rank)),
     "receives into the tensor that it is sending"),
    (lambda c: c.exchange(*[Recv(x := torch.eye(3), 1 - c.rank), Recv(x[1:, 1], 1 - c.rank)]),
     "receives two messages into the same memory"),
    (lambda c: (c.isend(x := torch.ones(3), 1 - c.rank), c.recv(x[1:], 1 - c.rank)),
     "receives into the tensor that it is sending; what arrives may overwrite what has not left "
     "yet, so receive into another tensor, or wait for the first"),
    (lambda c: (c.irecv(x := torch.ones(3), 1 - c.rank), c.labelled("a").send(x, 1 - c.rank)),
     "receives into the tensor that it is sending"),
    (lambda c: (c.isend(x := torch.ones(4), 1 - c.rank), collectives.broadcast(c, x)),
     "receives into the tensor that it is sending"),
    (lambda c: (c.irecv(x := torch.ones(3), 1 - c.rank), c.irecv(x, 1 - c.rank)),
     "receives two messages into the same memory"),
    (lambda c: c.send([1, {"a": (n for n in "b")}], 1 - c.rank), "ConfigError: generator <"),
    (lambda c: collectives.all_gather_object(c, c), "can't be sent: it can't be pickled"),
    (lambda c: collectives.scatter(c, torch.ones(2, 3), torch.ones(3)),
     "rank 1: the parts of scatter are given by the root, rank 0, alone"),
    (lambda c: collectives.scatterv(c, [torch.ones(3)] * 2, torch.ones(3)),
     "the parts of scatterv are given by the root"),
    (lambda c: collectives.gatherv(c, torch.ones(3), list(torch.ones(2, 3))),
     "the tensors of gatherv are given by the root"),
    (lambda c: collectives.scatter_object(c, [1, 2]), "the values of scatter_object"),
    (lambda c: collectives.scatter_object(c, [1] if c.rank == 0 else None), "a list of 2 values"),
    (lambda c: collectives.reduce_object(c, 1, "median"), "has no op 'median'"),
    (lambda c: collectives.broadcast_object(c, 1, root=2), "no root 2"),
])
def test_what_does_not_fit_is_refused_alike(backend: str, call: Any, says: str) -> None:
    with pytest.raises(dtlab.ConfigError) as told:
        BACKENDS[backend](call, 2)
    assert says in str(told.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_is_free_again_once_its_message_was_waited_for(backend: str) -> None:
    def fn(comm: Comm) -> list[float]:
        x, peer = torch.full((3,), float(comm.rank)), 1 - comm.rank
        sent, received = comm.isend(x, peer), comm.irecv(y := torch.zeros(3), peer)
        comm.exchange(Send(x[:1], peer), Recv(torch.zeros(1), peer))  # which reads it once more
        comm.wait_any([sent])
        comm.wait_any([received])
        again = comm.irecv(x[1:], peer)
        comm.send(y[1:], peer)
        again.wait()
        return x.tolist()

    assert BACKENDS[backend](fn, 2).values == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_of_one_matrix_are_exchanged(backend: str) -> None:
    def fn(comm: Comm) -> list[list[float]]:
        x = torch.full((3, 3), float(comm.rank))
        comm.sendrecv(x[:, 1], 1 - comm.rank, x[:, 0], 1 - comm.rank)
        return x.tolist()

    values = BACKENDS[backend](fn, 2).values
    assert values == [[[1.0, 0.0, 0.0]] * 3, [[0.0, 1.0, 1.0]] * 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_made_under_inference_mode_are_changed_after_it(backend: str) -> None:
    def fn(comm: Comm, made_in: Any) -> list[list[Any]]:
        p, results = comm.size, []
        for name in ("broadcast", "reduce", "all_reduce", "scan", "exscan", "all_gather", "gather",
                     "reduce_scatter", "all_to_all"):
            with made_in():
                x = torch.arange(2.0 * p).reshape(2, p).T + comm.rank  # has gaps
                column, z = x[:, 0], torch.complex(x, x).conj()
                out = torch.zeros(p, p, 2)
            function = getattr(collectives, name)
            if name in ("all_gather", "gather"):
                function(comm, x, out=out)
            for y in (x, z, z.imag, column, column.contiguous()):
                function(comm, y)
            results.append([y.tolist() for y in (x, z, z.imag, out)])
        return results

    plain = BACKENDS["simulated"](lambda comm: fn(comm, torch.no_grad), 3).values
    assert BACKENDS[backend](lambda comm: fn(comm, torch.inference_mode), 3).values == plain
