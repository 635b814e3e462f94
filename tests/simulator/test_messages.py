"""Which send meets which receive, on the simulator and on processes alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dtlab
from dtlab import Comm, Recv, Send, run, simulate, topology


def on(where: str, fn: Any, ranks: int) -> list[Any]:
    if where == "processes":
        return run(fn, ranks=ranks, echo=False, timeout=20).values
    return simulate(fn, network=topology.uniform(ranks, 1e-6, 1e9), echo=False).values


BOTH = pytest.mark.parametrize("where", ["simulator", "processes"])


@BOTH
def test_a_pair_receives_in_the_order_of_sending(where: str) -> None:
    def fn(comm: Comm) -> list[float]:
        if comm.rank == 0:
            for work in [comm.isend(torch.tensor([float(i)]), 1) for i in range(20)]:
                work.wait()
            return []
        boxes = [torch.zeros(1) for _ in range(20)]
        for work in reversed([comm.irecv(box, 0) for box in boxes]):
            work.wait()
        return [box.item() for box in boxes]

    assert on(where, fn, 2)[1] == [float(i) for i in range(20)]


@BOTH
def test_receiving_from_anyone_takes_everyone_in_its_order(where: str) -> None:
    def fn(comm: Comm) -> list[tuple[int, float]]:
        box, seen = torch.zeros(1), []
        for _ in range(2 * (comm.size - 1) if comm.rank == 0 else 0):
            sender = comm.recv(box)
            seen.append((sender, box.item()))
        for number in range(2 if comm.rank else 0):
            comm.send(torch.tensor([10.0 * comm.rank + number]), 0)
        return seen

    seen = on(where, fn, 5)[0]
    for rank in range(1, 5):
        assert [x for sender, x in seen if sender == rank] == [10.0 * rank, 10.0 * rank + 1]


@BOTH
def test_objects_and_tensors_keep_their_order(where: str) -> None:
    def fn(comm: Comm) -> Any:
        if comm.rank == 0:
            comm.send({"a": [1, 2]}, 1)
            comm.send(torch.arange(3), 1)
            comm.send("x" * 10_000, 1)
            return None
        first = comm.recv_object(0)
        x = torch.zeros(3, dtype=torch.int64)
        comm.recv(x, 0)
        inbox: list[Any] = []
        assert comm.recv(inbox) == 0
        return first, x.tolist(), len(inbox[0])

    assert on(where, fn, 2)[1] == ({"a": [1, 2]}, [0, 1, 2], 10_000)


@BOTH
def test_sub_communicators_never_mix_with_their_parent_while_both_are_busy(where: str) -> None:
    def fn(comm: Comm) -> Any:
        half = comm.split(color=comm.rank % 2, key=-comm.rank)
        assert half is not None
        outer, inner = torch.zeros(1), torch.zeros(1)
        peer, twin = (comm.rank + 2) % 4, 1 - half.rank  # the same process, twice
        works = comm.post(Recv(outer, peer))
        works += half.post(Recv(inner, twin))
        works += half.post(Send(torch.tensor([100.0 + comm.rank]), twin))
        works += comm.post(Send(torch.tensor([200.0 + comm.rank]), peer))
        for work in works:
            work.wait()
        alone = comm.split(None if comm.rank else 7)
        return half.rank, half.size, outer.item(), inner.item(), alone if alone is None else 1

    assert on(where, fn, 4) == [
        (1, 2, 202.0, 102.0, 1), (1, 2, 203.0, 103.0, None),
        (0, 2, 200.0, 100.0, None), (0, 2, 201.0, 101.0, None),
    ]


@BOTH
@pytest.mark.parametrize("make", [
    lambda: torch.arange(6.0), lambda: torch.tensor(3.5), lambda: torch.empty(0),
    lambda: torch.arange(12.0).reshape(3, 4).T, lambda: torch.arange(10)[::2],
    lambda: torch.tensor([True, False]), lambda: torch.tensor([1 + 2j, 3j]),
    lambda: torch.ones(3, dtype=torch.bfloat16), lambda: torch.ones(2, requires_grad=True),
])
def test_tensors_of_every_kind_arrive_as_they_left(where: str, make: Any) -> None:
    x = make()

    def fn(comm: Comm) -> Any:
        mine = x.detach() if comm.rank == 0 else torch.zeros_like(x)
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            comm.recv(mine, 0)
        return mine

    assert torch.equal(on(where, fn, 2)[1], x.detach())


@given(st.data())
def test_any_pattern_of_exchanges_delivers_every_value_once(data: st.DataObject) -> None:
    """All messages of a random pattern posted together; each receiver sees its senders' order."""
    p = data.draw(st.integers(2, 7))
    pairs = data.draw(st.lists(
        st.tuples(st.integers(0, p - 1), st.integers(0, p - 1)).filter(lambda t: t[0] != t[1]),
        max_size=25,
    ))

    def fn(comm: Comm) -> list[float]:
        boxes = [torch.zeros(1) for src, dst in pairs if dst == comm.rank]
        wanted = [Recv(box, src) for box, src in
                  zip(boxes, [s for s, d in pairs if d == comm.rank], strict=True)]
        given_ = [Send(torch.tensor([float(i)]), dst) for i, (src, dst) in enumerate(pairs)
                  if src == comm.rank]
        comm.exchange(*given_, *wanted)
        return [box.item() for box in boxes]

    values = simulate(fn, network=topology.uniform(p, 1e-6, 1e9)).values
    for rank in range(p):
        assert values[rank] == [float(i) for i, (_, dst) in enumerate(pairs) if dst == rank]


def test_an_eager_send_does_not_wait_and_a_rendezvous_does() -> None:
    def fn(comm: Comm) -> float:
        x = torch.ones(10, dtype=torch.uint8)
        if comm.rank == 0:
            comm.send(x, 1)
            free_s = comm.now()
            x.fill_(9)  # must not reach the receiver any more
            return free_s
        with comm.compute("late", seconds=1.0):
            pass
        box = torch.zeros(10, dtype=torch.uint8)
        comm.recv(box, 0)
        assert box.sum() == 10
        return comm.now()

    network = topology.uniform(2, 0.5, 10.0)
    assert simulate(fn, network=network).values == [2.5, 2.5]
    assert simulate(fn, network=network, eager_bytes=10).values == [0.0, 1.5]
    assert simulate(fn, network=network, eager_bytes=9).values == [2.5, 2.5]


def test_what_is_lent_to_a_communicator_of_one_rank_needs_no_messages() -> None:
    result = simulate(lambda comm: comm.split(0).size, network=topology.uniform(1, 1, 1))
    assert result.values == [1]
    assert isinstance(result, dtlab.Result)
