"""Shared memory between ranks: what is laid there is read there, and its memory serves again."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from dtlab import Comm, ps, run, simulate
from dtlab.processes import shelf
from dtlab.processes.shelf import LIMIT_BYTES, Shelf
from dtlab.processes.transfer import memory_file
from dtlab.topology import uniform
from tests.travelling import travelling

pytestmark = pytest.mark.skipif(not shelf.POSSIBLE, reason="no shared memory of this kind here")
KINDS = [torch.arange(5.0)[::2], torch.tensor([True, False]), torch.ones(1).expand(3),
         torch.tensor([1 + 2j, 3 - 1j]).conj(), torch.tensor([1 + 2j]).conj().imag,
         torch.arange(3, dtype=torch.bfloat16), torch.full((2,), 0.5, requires_grad=True),
         torch.arange(300_000)]


@pytest.fixture
def two() -> tuple[Shelf, Shelf]:
    """One shelf as its two ranks see it, in this process."""
    fd = memory_file("test")
    return Shelf(fd, 5000, 2, 0), Shelf(os.dup(fd), 5000, 2, 1)


@pytest.mark.parametrize("x", KINDS)
def test_a_gift_is_a_copy(two: tuple[Shelf, Shelf], x: torch.Tensor) -> None:
    mine, theirs = two
    laid = mine.lay(x)
    assert laid is not None
    assert laid[1]
    found = theirs.look(*laid).view(x.dtype)
    assert torch.equal(found, x)
    found.zero_()
    assert x.any()


def test_what_lies_there_already_is_shown_not_copied(two: tuple[Shelf, Shelf]) -> None:
    mine, theirs = two
    w = mine.empty(torch.float32, 1000)
    assert w is not None
    w.copy_(torch.arange(1000.0))
    laid = mine.lay(w[10:20])
    assert laid is not None
    assert not laid[1]
    found = theirs.look(*laid).view(torch.float32)
    assert found.tolist() == list(range(10, 20))
    w[10] = -1
    assert found[0] == -1
    assert theirs.lay(found)[1]  # type: ignore[index] # another's memory is not theirs to show


def test_what_does_not_lie_as_it_reads_is_copied(two: tuple[Shelf, Shelf]) -> None:
    mine, theirs = two
    w = mine.empty(torch.complex64, 4)
    assert w is not None
    w.copy_(torch.tensor([1 + 2j, 3 - 1j, 5, 1j]))
    for x in (w.conj(), w[::2], w.conj().imag):
        laid = mine.lay(x)
        assert laid is not None
        assert laid[1]
        assert torch.equal(theirs.look(*laid).view(x.dtype), x)


def test_many_blocks_need_few_open_files(two: tuple[Shelf, Shelf]) -> None:
    mine, theirs = two
    before = len(os.listdir("/proc/self/fd"))
    kept = [mine.empty(torch.int64, 1 + 512 * (number % 30)) for number in range(2000)]
    found = []
    for number, x in enumerate(kept):
        assert x is not None
        x.fill_(number)
        laid = mine.lay(x)
        assert laid is not None
        found.append(theirs.look(*laid).view(x.dtype))
    assert [int(x[-1]) for x in found] == list(range(2000))
    assert len({x.data_ptr() for x in found}) == 2000
    assert len(os.listdir("/proc/self/fd")) - before < 20


@pytest.mark.parametrize("mebibytes", [30, 40, 63, 64, 65, 130])
def test_blocks_about_as_long_as_a_window_lie_apart(
    two: tuple[Shelf, Shelf], mebibytes: int
) -> None:
    mine, theirs = two
    kept = [mine.empty(torch.uint8, mebibytes << 20), mine.empty(torch.uint8, 100),
            mine.empty(torch.uint8, mebibytes << 20), mine.empty(torch.uint8, 100)]
    found = []
    for number, x in enumerate(kept):
        assert x is not None
        x[::4096] = number
        x[-1] = number
        laid = mine.lay(x)
        assert laid is not None
        found.append(theirs.look(*laid))
    for number, x in enumerate(found):
        assert x[::4096].unique().tolist() == [number] == x[-1:].tolist()


def test_what_was_given_back_serves_again_where_it_was(two: tuple[Shelf, Shelf]) -> None:
    mine, _ = two
    first = mine.empty(torch.uint8, 50_000)
    assert first is not None
    address, taken = first.data_ptr(), mine._taken
    first.fill_(7)
    del first
    mine._clear()
    assert mine._taken == 0
    again = mine.empty(torch.uint8, 50_000)
    assert again is not None
    assert (again.data_ptr(), mine._taken) == (address, taken)
    assert not again.any()  # its memory had gone


def test_memory_is_free_once_no_tensor_lies_in_it(two: tuple[Shelf, Shelf]) -> None:
    mine, theirs = two
    blocks = set()
    for _ in range(20):
        laid = mine.lay(torch.ones(50_000))
        assert laid is not None
        found = theirs.look(*laid).view(torch.float32)
        part = found[7:9]
        del found
        gc.collect()
        again = mine.lay(torch.zeros(50_000))  # while a part of it is kept
        assert again is not None
        assert again[0][0] != laid[0][0]
        assert part.tolist() == [1, 1]
        mine.take_back(again[0])
        blocks |= {laid[0][0], again[0][0]}
        del part
    assert len(blocks) == 2


def test_of_idle_blocks_the_longest_idle_is_taken(two: tuple[Shelf, Shelf]) -> None:
    """However many are in use, few are looked at, so one more costs no more."""
    mine, _ = two
    kept = [mine.empty(torch.uint8, 100) for _ in range(100)]
    assert None not in kept
    del kept[50:]
    found = [mine.empty(torch.uint8, 100) for _ in range(100)]
    assert None not in found
    assert len({x.data_ptr() for x in [*kept, *found] if x is not None}) == 150


def test_when_memory_is_short_idle_blocks_go_then_none_is_to_be_had(
    two: tuple[Shelf, Shelf], monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, theirs = two
    monkeypatch.setattr(shelf, "LIMIT_BYTES", 1 << 20)
    first = mine.empty(torch.uint8, 900_000)
    assert first is not None
    assert mine.empty(torch.uint8, 400_000) is None
    assert mine.lay(torch.zeros(100_000)) is None
    address = first.data_ptr()
    del first
    second = mine.empty(torch.uint8, 600_000)  # of another length
    assert second is not None
    assert mine.empty(torch.uint8, 900_000) is None
    del second
    third = mine.empty(torch.uint8, 900_000)
    assert third is not None
    assert address not in mine._shown or third.data_ptr() == address
    laid = mine.lay(third.fill_(3))
    assert laid is not None
    assert theirs.look(*laid).eq(3).all()


def test_a_forked_child_frees_nothing(two: tuple[Shelf, Shelf]) -> None:
    mine, theirs = two
    laid = mine.lay(torch.ones(9))
    assert laid is not None
    found = theirs.look(*laid)
    if (child := os.fork()) == 0:
        del found
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    again = mine.lay(torch.zeros(9))
    assert again is not None
    assert again[0] != laid[0]
    assert found.view(torch.float32).tolist() == [1.0] * 9


def test_where_files_may_not_be_long_nothing_is_laid(tmp_path: Path) -> None:
    (tmp_path / "board").write_bytes(bytes(20_000))
    there = Shelf(os.open(tmp_path / "board", os.O_RDONLY), 20_000, 2, 1)
    assert there.lay(torch.ones(9)) is None
    assert there.empty(torch.float32, 9) is None


def test_of_nothing_nothing_is_laid(two: tuple[Shelf, Shelf]) -> None:
    assert two[0].lay(torch.zeros(0)) is None
    assert two[0].empty(torch.float32, 0) is None


def train(comm: Comm, elements: int, steps: int = 4) -> tuple[list[float], int]:
    """The sum of the weights after some steps, and how much memory this rank's blocks take."""
    node = ps.join(comm, consistency=ps.BSP(), update=ps.SGD(lr=0.5, momentum=0.9))
    if node.is_server:
        node.serve()
    else:
        node.init({"w": torch.ones(elements), "b": torch.ones(3)})
        for _ in range(steps):
            w = node.pull(["w", "b"])
            node.push({key: x + comm.rank for key, x in w.items()})
            node.clock()
        w = node.pull(["w", "b"])
        node.finish()
    shared = getattr(comm, "shared", None)
    taken = comm.end.shelf._taken if shared is not None else 0  # type: ignore[attr-defined]
    return [] if node.is_server else [x.double().sum().item() for x in w.values()], taken


@pytest.mark.parametrize("elements", [10, 5000, 400_000])
def test_training_is_the_same_with_shared_memory_without_and_simulated(elements: int) -> None:
    def without(comm: Comm) -> tuple[list[float], int]:
        return train(travelling(comm), elements)

    here = run(train, elements, ranks=3)
    there = run(without, ranks=3)
    virtual = simulate(train, elements, network=uniform(3, 1e-6, 1e9))
    weights = [[values for values, _ in result.values] for result in (here, there, virtual)]
    assert weights[0] == weights[1] == weights[2]
    assert min(taken for _, taken in here.values) > 0
    assert {taken for _, taken in there.values} == {0}
    for rank in range(3):  # what travels in either way stands in the trace, as in the simulator
        assert _tensors(here, rank) == _tensors(there, rank) == _tensors(virtual, rank)


def _tensors(result: object, rank: int) -> list[int]:
    """Bytes of the tensors that `rank` has sent: those of objects depend on their pickles."""
    return sorted(t.nbytes for t in result.trace.transfers  # type: ignore[attr-defined]
                  if t.src == rank and t.nbytes in (12, 40, 52, 20_000, 1_600_000))


def test_memory_does_not_grow_from_step_to_step() -> None:
    few, many = (max(taken for _, taken in run(train, 100_000, steps, ranks=3).values)
                 for steps in (10, 40))
    assert many == few
    assert few < LIMIT_BYTES


def test_without_room_tensors_travel() -> None:
    def crowded(comm: Comm) -> list[float]:
        shelf.LIMIT_BYTES = 0
        return train(comm, 5000)[0]

    assert run(crowded, ranks=3).values == [v for v, _ in run(train, 5000, ranks=3).values]
