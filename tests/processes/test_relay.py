"""Relays over Gloo: pieces, what is compared, what a hang is called."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtlab import Comm, Deadlock, RankFailed, ShapeMismatch, run
from dtlab.processes.communicator import GlooComm
from dtlab.relay import one_by_one, relay


def around(comm: Comm, sizes: list[int]) -> tuple[list[torch.Tensor], int, int]:
    """Chunk c has sizes[c] elements, one a rank; in the order in which they pass this rank."""
    chunks = [torch.arange(float(n)) * (comm.rank + 1) for n in sizes]
    tour = [chunks[(comm.rank - step) % comm.size] for step in range(2 * comm.size - 1)]
    return tour, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


class Recorder:
    """Gloo, with a note of how many bytes it was given to send each time."""

    def __init__(self, group: Any):
        self.group, self.nbytes = group, list[int]()
        self.recv = group.recv

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        self.nbytes.append(tensors[0].nbytes)
        return self.group.send(tensors, dst, tag)


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("sizes", [[3] * 5, [0, 7, 0, 1, 2], [300_000, 1, 131_073, 800_000, 0]])
def test_a_relay_is_as_many_exchanges(ranks: int, sizes: list[int]) -> None:
    def work(comm: Comm, op: Any) -> bool:
        all_right = True
        for adding in (0, comm.size - 1):
            (plain, right, left), (pieces, _, _) = (around(comm, sizes[:ranks]) for _ in range(2))
            one_by_one(comm, plain, right, left, op, adding)
            relay(comm, pieces, right, left, op, adding)
            all_right &= all(map(torch.equal, plain, pieces))
        comm.sendrecv(torch.ones(2), right, into := torch.zeros(2), left)  # the count is right
        return all_right and into.sum().item() == 2

    for op in ("sum", "max", lambda a, b: a + b):
        result = run(work, op, ranks=ranks)
        assert all(result.values)
        assert result.trace.messages() == ranks * (8 * (ranks - 1) + 1)
        assert all(event.end_s >= event.start_s for event in result.trace.events)
        assert all(run(work, op, ranks=ranks, trace=False).values)


@pytest.mark.parametrize(("elements", "pieces"), [
    (1000, [4000]), (131_072, [524_288]), (131_073, [262_144, 262_148]),
    (700_000, [933_332, 933_332, 933_336]),
])
def test_long_chunks_go_in_pieces_and_count_as_one(elements: int, pieces: list[int]) -> None:
    def work(comm: Comm) -> list[int]:
        assert isinstance(comm, GlooComm)
        comm.end.group = group = Recorder(comm.end.group)
        tour, right, left = around(comm, [elements] * 2)
        relay(comm, tour, right, left, adding=1)
        return sorted(group.nbytes)

    result = run(work, ranks=2)
    assert result.values == [sorted(pieces * 2)] * 2
    assert [m.nbytes for m in result.trace.transfers] == [4 * elements] * 4


def test_a_relay_takes_tensors_that_need_the_long_way() -> None:
    def work(comm: Comm) -> list[list[complex]]:
        x, other = whole(comm.rank), 1 - comm.rank
        rows = [x[0], x[1].conj()] if comm.rank else [x[0].clone(), x[1].clone()]
        relay(comm, rows, other, other, adding=1)
        return [row.tolist() for row in rows]

    def whole(rank: int) -> torch.Tensor:
        return torch.arange(6.0).view(2, 3).T * (rank + 1j)

    mine = [whole(0), whole(1)]
    assert run(work, ranks=2).values == [
        [mine[0][0].tolist(), (mine[0][1] + mine[1][0]).tolist()],
        [mine[1][0].tolist(), (mine[1][1].conj() + mine[0][0]).tolist()],
    ]


@pytest.mark.parametrize("chunks", [
    [torch.ones(4)] * 3,  # more than the other has
    [torch.ones(3), torch.ones(3), torch.ones(3, dtype=torch.float64)],
    [torch.ones(3), torch.ones(3), torch.ones(4), torch.ones(3)],  # the first fits
    [torch.ones(3)] * 40,  # too many to be named one by one
])
def test_a_relay_that_does_not_fit_is_refused(chunks: list[torch.Tensor]) -> None:
    def work(comm: Comm) -> None:
        relay(comm, chunks if comm.rank else [torch.ones(3)] * 4, 1 - comm.rank, 1 - comm.rank)

    with pytest.raises(RankFailed, match="ShapeMismatch"):
        run(work, ranks=2, timeout=20)


def test_an_op_that_is_not_known_is_refused() -> None:
    def work(comm: Comm) -> None:
        relay(comm, [torch.ones(3)] * 2, 1 - comm.rank, 1 - comm.rank, "mean", adding=1)

    with pytest.raises(RankFailed, match="unknown op 'mean'"):
        run(work, ranks=2, timeout=20)


def test_a_refused_relay_takes_back_what_it_announced() -> None:
    def work(comm: Comm) -> float:
        other, side = 1 - comm.rank, comm.split(0)
        assert side is not None
        if comm.rank == 1:
            with comm.labelled("relay"):
                posted = [comm.irecv(torch.zeros(3), 0), comm.isend(torch.ones(3), 0)]
            side.send("posted", 0)
            for message in posted:
                message.wait()
            return 3.0
        side.recv_object(1)
        with pytest.raises(ShapeMismatch):
            relay(comm, [torch.ones(4), torch.zeros(3)], other, other)
        relay(comm, [torch.ones(3), into := torch.zeros(3)], other, other)
        assert isinstance(comm, GlooComm)
        assert (comm.sent[other], comm.received[other]) == (1, 1)
        return into.sum().item()

    assert run(work, ranks=2).values == [3.0, 3.0]


def test_a_relay_does_not_meet_a_plain_message() -> None:
    def work(comm: Comm) -> None:
        if comm.rank:
            relay(comm, [torch.ones(3), torch.ones(3)], 0, 0)
        else:
            comm.sendrecv(torch.ones(3), 1, torch.ones(3), 1)

    with pytest.raises(RankFailed, match=r"in (relay|a plain send), but rank . is in (relay|a p)"):
        run(work, ranks=2, timeout=20)


def test_whoever_takes_long_over_an_addition_is_not_called_deadlocked() -> None:
    def slowly(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 0:
            time.sleep(1.2)  # more than twice what must have passed before a hang is called one
        return a + b

    def work(comm: Comm) -> float:
        tour, right, left = around(comm, [2, 2, 2])
        relay(comm, tour, right, left, slowly, adding=2)
        return tour[-1][1].item()

    assert run(work, ranks=3).values == [6.0, 6.0, 6.0]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_never_joins_a_relay_is_named(missing: int) -> None:
    def work(comm: Comm) -> None:
        if comm.rank != missing:
            tour, right, left = around(comm, [200_000] * 3)
            relay(comm, tour, right, left, adding=2)

    with pytest.raises(Deadlock, match=f"{missing}  returned"):
        run(work, ranks=3, timeout=20)


def test_a_rank_that_leaves_a_relay_half_way_is_named() -> None:
    def work(comm: Comm) -> None:
        tour, right, left = around(comm, [200_000] * 3)
        relay(comm, tour[: 3 if comm.rank == 1 else 5] if comm.rank else tour, right, left)

    with pytest.raises(RankFailed, match="ShapeMismatch"):
        run(work, ranks=3, timeout=20)
