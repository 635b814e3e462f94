"""The page every learner reads first: every communicator keeps what it says."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import dtlab
from dtlab import Comm, Recv, Send, run, simulate, topology
from dtlab.collectives import all_reduce
from dtlab.reduction import COMBINE, combine_


def on(where: str, fn: Callable[[Comm], Any], p: int) -> list[Any]:
    if where == "processes":
        return run(fn, ranks=p, echo=False).values
    return simulate(fn, network=topology.uniform(p, 1e-6, 1e9), echo=False).values


BOTH = pytest.mark.parametrize("where", ["simulator", "processes"])


def test_the_communicator_is_one_page() -> None:
    page = Path(dtlab.comm.__file__).read_text().splitlines()
    assert len(page) <= 305


@BOTH
def test_every_way_to_send_and_receive(where: str) -> None:
    def fn(comm: Comm) -> list[float]:
        right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        x, boxes = torch.full((2,), comm.rank + 1.0), [torch.zeros(2) for _ in range(5)]
        comm.sendrecv(x, right, boxes[0], left)
        comm.exchange(Send(x, right), Recv(boxes[1], left))
        sent, received = comm.isend(x, right), comm.irecv(boxes[2], left)
        assert (sent.wait(), received.wait(), sent.wait()) == (right, left, right)
        works = comm.post(Recv(boxes[3], left), Send(x, right))
        assert [work.wait() for work in works] == [left, right]
        if comm.rank == 0:
            comm.send(x, right)
            assert comm.recv(boxes[4], left) == left
        else:
            assert comm.recv(boxes[4], left) == left
            comm.send(x, right)
        return [box[1].item() for box in boxes]

    assert on(where, fn, 3) == [[3.0] * 5, [1.0] * 5, [2.0] * 5]


@BOTH
def test_split_orders_by_key_then_by_old_rank(where: str) -> None:
    def fn(comm: Comm) -> Any:
        group = comm.split(None if comm.rank == 2 else comm.rank % 2, key=-(comm.rank // 3))
        again = group.split(0, key=-group.rank) if group else None
        comm.split(1)  # everyone once more, also those who are in no group
        return group and (group.rank, group.size, again.rank if again else None)

    # Colour 0: ranks 0 (key 0) and 4 (key −1). Colour 1: 1 (key 0), 3 and 5 (key −1).
    assert on(where, fn, 6) == [(1, 2, 0), (2, 3, 0), None, (0, 3, 2), (0, 2, 1), (1, 3, 1)]


@BOTH
def test_messages_of_nested_groups_never_mix(where: str) -> None:
    """The same pair of ranks, in three communicators at once, received in another order."""
    def fn(comm: Comm) -> list[float]:
        inner = comm.split(0)
        assert inner is not None
        innermost = inner.split(0, key=-inner.rank)
        assert innermost is not None
        comms = [comm, inner, innermost]
        boxes = [torch.zeros(1) for _ in comms]
        works = []
        for number, c in enumerate(comms):
            works.append(c.isend(torch.tensor([10.0 * number + comm.rank]), 1 - c.rank))
        for box, c in reversed(list(zip(boxes, comms, strict=True))):
            works.append(c.irecv(box))  # from anyone: but of that communicator only
        for work in works:
            work.wait()
        return [box.item() for box in boxes]

    assert on(where, fn, 2) == [[1.0, 11.0, 21.0], [0.0, 10.0, 20.0]]


@given(st.data())
def test_random_splits_and_traffic_in_all_groups_at_once(data: st.DataObject) -> None:
    p = data.draw(st.integers(1, 9))
    colors = [data.draw(st.lists(st.sampled_from([0, 1, 2, None]), min_size=p, max_size=p))
              for _ in range(3)]

    def fn(comm: Comm) -> list[list[int]]:
        groups = [comm] + [g for c in colors if (g := comm.split(c[comm.rank])) is not None]
        boxes = [[torch.full((1,), -1) for _ in range(g.size)] for g in groups]
        ops = []
        for number, (g, inbox) in enumerate(zip(groups, boxes, strict=True)):
            for peer in range(g.size):
                if peer != g.rank:
                    ops.append((g, Send(torch.tensor([100 * number + comm.rank]), peer)))
                    ops.insert(0, (g, Recv(inbox[peer], peer)))
        works = [g.post(op)[0] for g, op in ops]
        for work in works:
            work.wait()
        return [[int(box) for box in inbox] for inbox in boxes]

    values = simulate(fn, network=topology.uniform(p, 1e-6, 1e9)).values
    for rank in range(p):
        members = [list(range(p))] + [
            [r for r in range(p) if c[r] == c[rank]] for c in colors if c[rank] is not None]
        for inbox, group in zip(values[rank], members, strict=True):
            for peer, got in zip(group, inbox, strict=True):
                assert got == -1 if peer == rank else got % 100 == peer


@BOTH
def test_specific_and_general_receives_share_the_senders_in_order(where: str) -> None:
    """A receive from one rank leaves the others' messages to the receives from anyone."""
    def fn(comm: Comm) -> Any:
        if comm.rank:
            for turn in range(2):
                comm.send(torch.tensor([10 * comm.rank + turn]), 0)
            return None
        boxes = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
        senders = [comm.recv(boxes[0], 2)]
        senders += [comm.recv(box) for box in boxes[1:]]
        got = [int(box) for box in boxes]
        assert senders[0] == 2
        assert got[0] == 20
        for src in (1, 2):
            mine = [value for sender, value in zip(senders, got, strict=True) if sender == src]
            assert mine == [10 * src, 10 * src + 1]
        return True

    assert on(where, fn, 3)[0]


@pytest.mark.parametrize("late_s", [0.0, 10.0])
def test_receives_from_anyone_take_what_comes_first_or_has_waited_longest(late_s: float) -> None:
    def fn(comm: Comm) -> Any:
        if comm.rank:
            with comm.compute("wait", seconds=float(comm.size - comm.rank)):
                pass
            comm.send(torch.tensor([comm.rank]), 0)
            return None
        with comm.compute("wait", seconds=late_s):
            pass
        boxes = [torch.zeros(1, dtype=torch.int64) for _ in range(comm.size - 1)]
        works = comm.post(*map(Recv, boxes))
        return [work.wait() for work in works], [int(box) for box in boxes]

    assert simulate(fn, network=topology.uniform(4, 0, 1e9)).values[0] == ([3, 2, 1], [3, 2, 1])


@BOTH
@pytest.mark.parametrize("src", [0, None])
def test_a_cancelled_receive_still_takes_its_message(where: str, src: int | None) -> None:
    def fn(comm: Comm) -> list[float]:
        if comm.rank == 0:
            comm.recv_object(1)
            for value in (1.0, 2.0, 3.0):
                comm.send(torch.tensor([value]), 1)
            return []
        boxes = [torch.zeros(1) for _ in range(3)]
        works = [comm.irecv(box, src) for box in boxes]
        works[1].cancel()
        works[1].cancel()  # once more changes nothing
        assert comm.wait_any([works[0]], 0.01) is None
        comm.send("all are posted", 0)
        assert [works[2].wait(), works[0].wait()] == [0, 0]
        return [boxes[0].item(), boxes[2].item()]

    assert on(where, fn, 2)[1] == [1, 3]


@BOTH
@pytest.mark.parametrize(("sent", "wanted"), [
    (torch.ones(2, 3), torch.ones(3, 2)), (torch.ones(6), torch.ones(2, 3)),
    (torch.ones(1), torch.tensor(1.0)), (torch.ones(2), torch.ones(2, dtype=torch.int32)),
    (torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16)),
    (torch.ones(0, 3), torch.ones(0)), (torch.ones(2), []), ("object", torch.ones(2)),
], ids=str)
def test_equal_numbers_of_bytes_are_not_enough(where: str, sent: Any, wanted: Any) -> None:
    def fn(comm: Comm) -> None:
        comm.send(sent, 1) if comm.rank == 0 else comm.recv(wanted, 0)

    with pytest.raises(dtlab.ShapeMismatch, match=r"rank 0 sent .*rank 1 waits to receive"):
        on(where, fn, 2)


@BOTH
@pytest.mark.parametrize(("first", "then", "says"), [
    (Recv(torch.zeros(1)), Recv(torch.zeros(1), 1), r"float32 \(1,\) .* names its sender"),
    (Recv([], 1), Recv([]), "an object from anyone is under way beside one that names its sender"),
    (Recv([]), Recv(torch.zeros(2)), r"an object from anyone .* beside one of float32 \(2,\)"),
    (Recv([]), "labelled", "an object from anyone is under way beside one of an object in mine")])
@pytest.mark.parametrize("together", [True, False])
def test_which_message_a_receive_meets_does_not_depend_on_who_comes_first(
    where: str, first: Recv, then: Recv | str, says: str, together: bool
) -> None:
    def fn(comm: Comm) -> None:
        if comm.rank == 0 and together and isinstance(then, Recv):
            comm.exchange(first, then)
        elif comm.rank == 0:
            work = comm.irecv(*first)
            if isinstance(then, Recv):
                comm.irecv(*then)
            else:
                comm.labelled("mine").irecv([])
            work.wait()

    with pytest.raises(dtlab.RankFailed, match=f"raised ConfigError: rank 0: a receive of {says}"):
        on(where, fn, 2)


@BOTH
def test_receives_from_anyone_and_from_named_ranks_follow_each_other_or_are_apart(where: str
                                                                                  ) -> None:
    def fn(comm: Comm) -> list[int]:
        other = comm.subgroup(range(comm.size))
        if comm.rank:
            comm.send(torch.tensor([1]), 0)
            comm.send(torch.tensor([2, 2]), 0)
            other.send(torch.tensor([3, 3, 3]), 0)
            return []
        boxes = [torch.zeros(n, dtype=torch.int64) for n in (1, 2, 3)]
        beside = other.irecv(boxes[2], 1)
        comm.irecv(boxes[0]).wait()
        comm.irecv(boxes[1], 1).wait()
        beside.wait()
        return [int(box.sum()) for box in boxes]

    assert on(where, fn, 2)[0] == [1, 4, 9]


@BOTH
@pytest.mark.parametrize("sent", [torch.ones(2), torch.ones(50), "an object"], ids=str)
@pytest.mark.parametrize("late", [0, 1])
def test_the_second_of_two_receives_from_anyone_is_checked_too(
    where: str, sent: Any, late: int
) -> None:
    """Larger messages would end the process, smaller ones fill a part of it."""
    def fn(comm: Comm) -> None:
        if comm.rank == late:
            time.sleep(0.3 if where == "processes" else 0)
        if comm.rank:
            comm.exchange(Send(torch.ones(5), 0), Send(sent, 0))
        else:
            comm.exchange(Recv(torch.zeros(5)), Recv(torch.zeros(5)))

    with pytest.raises(dtlab.ShapeMismatch, match=r"rank 1 sent .* rank 0 waits .* \(5,\)"):
        on(where, fn, 2)


@BOTH
def test_a_label_is_the_communicators_that_labelled_returns_and_collectives_add_theirs(where: str
                                                                                       ) -> None:
    def fn(comm: Comm) -> list[str]:
        named, push = comm.labelled("outer"), comm.labelled("push").collective("all_reduce(mine)")
        return [comm.label, named.label, named.labelled("inner").label, named.subgroup([0]).label,
                push.label, push.collective("gather(x)").collective("scatter(x)").label,
                comm.collective("gather(x)").label, comm.label]

    assert on(where, fn, 1)[0] == [
        "", "outer", "inner", "outer", "push: all_reduce(mine)",
        "push: all_reduce(mine) > gather(x) > scatter(x)", "gather(x)", ""]


def test_accumulate_changes_its_first_argument_and_returns_it() -> None:
    def fn(comm: Comm) -> bool:
        into, x = torch.tensor([1.0, 5.0]), torch.tensor([3.0, 2.0])
        wanted = {"sum": [4, 7], "avg": [4, 7], "prod": [3, 10], "max": [3, 5], "min": [1, 2]}
        for op in COMBINE:
            mine = into.clone()
            assert comm.accumulate_(mine, x, op) is mine
            assert mine.tolist() == wanted[op]
        comm.accumulate_(into, x, lambda a, b: a - b)
        return into.tolist() == [-2.0, 3.0] and x.tolist() == [3.0, 2.0]

    assert simulate(fn, network=topology.uniform(1, 0, 1)).values == [True]


@pytest.mark.parametrize(("into", "x", "op", "error", "says"), [
    (torch.ones(2), torch.ones(3), "sum", dtlab.ShapeMismatch, r"\(3,\).*\(2,\)"),
    (torch.ones(2), torch.ones(2).double(), "sum", dtlab.ShapeMismatch, "float64.*float32"),
    (torch.ones(1), torch.ones(1), "plus", dtlab.ConfigError, "plus.*sum"),
])
def test_accumulate_refuses_what_does_not_fit(
    into: torch.Tensor, x: torch.Tensor, op: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        combine_(into, x, op)


@pytest.mark.parametrize("peer", [2, -1, 0.5, "1", True, None, torch.tensor(1), []])
def test_ranks_that_do_not_exist(peer: Any) -> None:
    def fn(comm: Comm) -> None:
        if comm.rank == 0:
            comm.send(torch.ones(1), peer)

    with pytest.raises(dtlab.ConfigError, match="rank 0: can't send to rank"):
        simulate(fn, network=topology.uniform(2, 0, 1))


@BOTH
def test_objects_of_any_kind(where: str) -> None:
    def fn(comm: Comm) -> Any:
        things = [None, 7, "text", {"a": torch.arange(3)}, lambda y: y + 1, [1, [2]]]
        if comm.rank == 0:
            for thing in things:
                comm.send(thing, 1)
            return None
        got: list[Any] = []
        for turn in range(len(things)):
            if turn % 2:
                got.append(comm.recv_object(0))
            else:
                assert comm.recv(got, 0) == 0
        return got[:3], got[3]["a"].tolist(), got[4](1), got[5]

    assert on(where, fn, 2)[1] == ([None, 7, "text"], [0, 1, 2], 2, [1, [2]])


def test_an_object_is_a_copy_and_its_bytes_are_counted() -> None:
    def fn(comm: Comm) -> Any:
        if comm.rank == 0:
            mine = [1, 2]
            work = comm.isend(mine, 1)
            mine.append(3)  # too late: it is on its way
            work.wait()
            return mine
        return comm.recv_object(0)

    result = simulate(fn, network=topology.uniform(2, 0, 1e9))
    assert result.values == [[1, 2, 3], [1, 2]]
    assert result.trace.sent_bytes() > 0


@BOTH
def test_what_arrives_in_a_tensor_that_autograd_has_saved_is_noticed(where: str) -> None:
    def fn(comm: Comm) -> None:
        y = torch.ones(2, requires_grad=True).exp()
        if comm.rank:
            comm.send(torch.zeros(2), 0)
        else:
            comm.recv(y, 1)
            y.sum().backward()

    with pytest.raises(dtlab.RankFailed, match="modified by an inplace operation"):
        on(where, fn, 2)


class Tagged(torch.Tensor):
    pass


@BOTH
def test_a_subclass_of_tensors_arrives(where: str) -> None:
    def fn(comm: Comm) -> list[float]:
        x = torch.full((2,), float(comm.rank)).as_subclass(Tagged)
        comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)
        return x.tolist()  # type: ignore[no-any-return]

    assert on(where, fn, 2) == [[0.0, 0.0]] * 2


def _func(comm: Comm) -> Any:
    return torch.func.functionalize(lambda x: all_reduce(comm, x * 1))(torch.ones(2))


def _fake(comm: Comm) -> Any:
    with FakeTensorMode():
        comm.send(torch.ones(2), 1 - comm.rank)


def _dual(comm: Comm) -> Any:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        return forward_ad.unpack_dual(all_reduce(comm, x))


@BOTH
@pytest.mark.parametrize(("fn", "says"), [
    (_func, "a tensor without memory"), (_fake, "a tensor without memory"),
    (_dual, "a dual tensor"), (lambda comm: comm.wait_any([]), "nothing to wait for")])
def test_tensors_without_memory_or_with_tangents_are_refused_and_waiting_for_nothing(
    where: str, fn: Any, says: str
) -> None:
    with pytest.raises(dtlab.RankFailed, match=rf"raised (Config|ShapeMismatch).* {says}"):
        on(where, fn, 2)
