"""Waits with a limit, and ranks that die without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtlab import Comm, ConfigError, Deadlock, RankDied, Recv, simulate
from dtlab.topology import uniform

NETWORK = uniform(2, 1e-3, 1e9)


def waits(comm: Comm, sleep_s: float, limits: list[float]) -> Any:
    if comm.rank == 0:
        with comm.compute("sleep", seconds=sleep_s):
            pass
        comm.send(torch.ones(1), 1)
        return None
    x, found = torch.zeros(1), []
    work = comm.irecv(x, 0)
    for limit in limits:
        found.append((comm.wait_any([work], limit) is work, comm.now()))
    work.wait()
    return found, x.item()


def test_a_wait_with_a_limit_ends_with_the_message_or_at_the_limit() -> None:
    found, x = simulate(waits, 0.01, [0.004, 0.004, 9.0, 1.0], network=NETWORK).values[1]
    assert [done for done, _ in found] == [False, False, True, True]
    arrived_s = 0.011 + 4e-9
    assert [at for _, at in found] == pytest.approx([0.004, 0.008, arrived_s, arrived_s])
    assert x == 1


def test_a_message_that_comes_at_the_very_limit_has_come() -> None:
    network = uniform(2, 0, 8.0)  # 4 bytes take half a second
    found, x = simulate(waits, 0.5, [1.0, 1.0], network=network).values[1]
    assert found == [(True, 1.0), (True, 1.0)]
    assert x == 1


def test_of_several_messages_the_first_ends_the_wait() -> None:
    def body(comm: Comm) -> Any:
        if comm.rank:
            with comm.compute("sleep", seconds=[0, 0.3, 0.1, 0.1][comm.rank]):
                pass
            comm.send(torch.tensor([float(comm.rank)]), 0)
            return None
        boxes = [torch.zeros(1) for _ in range(3)]
        works = [comm.irecv(box, src) for src, box in enumerate(boxes, start=1)]
        found = []
        coming = works[:]
        for limit in (0.05, 1.0, 1.0, 0.1, 1.0):
            first = comm.wait_any(coming, limit)
            found.append((None if first is None else works.index(first), round(comm.now(), 3)))
            if first is not None:
                first.wait()
                coming.remove(first)
        return found, [box.item() for box in boxes]

    found, boxes = simulate(body, network=uniform(4, 0, 1e9)).values[0]
    assert found == [(None, 0.05), (1, 0.1), (2, 0.1), (None, 0.2), (0, 0.3)]
    assert boxes == [1, 2, 3]


def test_a_rank_that_crashes_leaves_the_others_alone() -> None:
    def body(comm: Comm) -> Any:
        if comm.rank == 0:
            comm.send(torch.ones(1), 1)
            comm.send(torch.ones(1), 1)
            return "all sent"
        x = torch.zeros(1)
        found = []
        for _ in range(2):
            work = comm.irecv(x, 0)
            found.append(comm.wait_any([work], 1.0) is work)
            work.wait() if found[-1] else work.cancel()
        return found

    for events, received, said in ((0, [False, False], None), (1, [True, False], None),
                                   (2, [True, True], "all sent"), (9, [True, True], "all sent")):
        assert simulate(body, network=NETWORK, crash={0: events}).values == [said, received]


def test_events_in_a_part_of_the_communicator_count_too() -> None:
    def body(comm: Comm) -> int:
        part = comm.split(0)
        assert part is not None
        for where in (comm, part, part):
            if comm.rank:
                where.recv(torch.zeros(1), 0)
            else:
                where.send(torch.ones(1), 1)
        return comm.rank

    with pytest.raises(Deadlock, match="0 crashed, and others wait for that") as caught:
        simulate(body, network=NETWORK, crash={0: 2})
    assert [row.doing for row in caught.value.waiting] == ["crashed", "recv"]
    assert simulate(body, network=NETWORK, crash={0: 3}).values == [0, 1]


@pytest.mark.parametrize("crash", [{2: 1}, {0: -1}, {0: 1.5}, [0]])
def test_crashes_that_make_no_sense_are_refused(crash: Any) -> None:
    with pytest.raises(ConfigError, match="crash is a dict"):
        simulate(lambda comm: None, network=NETWORK, crash=crash)


def test_a_limit_must_be_a_time() -> None:
    with pytest.raises(ConfigError, match="0 or more, and finite"):
        simulate(waits, 0.01, [-1.0], network=NETWORK)


def late(comm: Comm) -> float:
    """What rank 1 receives of rank 0 a second later."""
    x = torch.zeros(1)
    if comm.rank == 1:
        comm.recv(x, 0)
    elif comm.rank == 0:
        with comm.compute("late", seconds=1.0):
            pass
        comm.send(torch.ones(1), 1)
    return x.item()


def test_an_agreement_or_a_message_at_the_instant_of_a_death_wakes_its_waiter_once() -> None:
    def agrees(comm: Comm) -> float:
        comm.split(0)
        return late(comm.shrink())

    assert simulate(agrees, network=NETWORK).values == [0, 1]

    def exchanges(comm: Comm) -> float:
        try:
            if comm.rank == 1:
                comm.exchange(Recv(torch.zeros(1), 0), Recv(torch.zeros(1), 2))
            comm.send(torch.zeros(1), 1 if comm.rank == 0 else 0)  # rank 2 dies before
            comm.recv(torch.zeros(1), 2)
        except RankDied:
            pass
        return late(comm.shrink())

    network = uniform(3, 0, 8.0)  # the message of rank 0 arrives when the death is noticed
    assert simulate(exchanges, network=network, crash={2: 0}, detect_s=0.5).values == [0, 1, None]


def test_what_is_cut_off_before_anyone_waits_for_it_has_not_come() -> None:
    def body(comm: Comm) -> str:
        x = torch.zeros(1)
        work = comm.isend(torch.ones(1), 1) if comm.rank == 0 else comm.irecv(x, 0)
        with comm.compute("long", seconds=1.0):  # rank 0 dies before
            pass
        with pytest.raises(RankDied):
            work.wait()
        return f"{x.item()} of {comm.shrink().size}"

    network = uniform(2, 0, 8.0)  # half a second on its way
    values = simulate(body, network=network, crash={0: 1}, detect_s=0.3).values
    assert values == [None, "0.0 of 1"]


def test_a_crash_between_the_end_of_shrink_and_its_return_is_noticed() -> None:
    def body(comm: Comm) -> int:
        def sends_at_last(stream: Comm) -> None:
            try:
                stream.recv(torch.zeros(1), 0)
            except RankDied:
                stream.send(torch.ones(1), 0)

        if comm.rank == 1:
            comm.begin(sends_at_last)
            with comm.compute("before shrink", seconds=1.0):
                pass
        else:
            with pytest.raises(RankDied):
                comm.recv(torch.zeros(1), 1)
        comm = comm.shrink()
        assert comm.size == 2
        with pytest.raises(RankDied):
            comm.split(0)
        return comm.shrink().size

    assert simulate(body, network=NETWORK, crash={1: 3}, detect_s=0.1).values == [1, None]


@pytest.mark.parametrize("eager_bytes", [0, 1000])
def test_a_send_that_nobody_can_receive_raises(eager_bytes) -> None:
    """Over what `shrink` has ended, and to a dead rank, though the sender need not wait."""
    def body(comm: Comm) -> list[int]:
        with pytest.raises(RankDied):
            comm.recv(torch.zeros(1), 2)
        raised = []
        comm.shrink()
        for peer in (1 - comm.rank, 2):
            with pytest.raises(RankDied) as error:
                comm.send(torch.zeros(1), peer)
            raised.append(error.value.rank)
        return raised

    values = simulate(body, network=uniform(3, 0, 8.0), crash={2: 0}, detect_s=0.1,
                      eager_bytes=eager_bytes).values
    assert values == [[1, 2], [0, 2], None]
