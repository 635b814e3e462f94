"""The communicator of real processes against what every communicator promises."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dtlab import Comm, Send, Session

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
          torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32,
          torch.int64, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.float8_e5m2]
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # to shrink takes minutes: each try hangs
LAYOUTS = ["contiguous", "transposed", "strided", "expanded", "conjugated", "channels_last"]


def raw(x: torch.Tensor) -> bytes:
    """The elements of `x`, in order, as bytes: equal for NaNs too."""
    flat = torch.empty(x.numel(), dtype=x.dtype)
    flat.copy_(x.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def laid_out(shape: list[int], dtype: torch.dtype, layout: str, seed: int) -> torch.Tensor:
    """Some tensor of that shape, dtype and layout; the same one for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def dense(*shape: int) -> torch.Tensor:
        raw = torch.randint(0, 2, shape, generator=generator)
        return (raw + 1j).to(dtype) if dtype.is_complex else raw.to(dtype)

    if layout == "transposed":
        return dense(*reversed(shape)).permute(list(reversed(range(len(shape)))))
    if layout == "strided" and shape:
        return dense(*shape[:-1], shape[-1] * 2)[..., ::2]
    if layout == "expanded" and shape:
        return dense(1, *shape[1:]).expand(*shape)
    if layout == "conjugated" and dtype.is_complex:
        return dense(*shape).conj()
    if layout == "channels_last" and len(shape) == 4:
        return dense(*shape).to(memory_format=torch.channels_last)
    return dense(*shape)


@pytest.fixture(scope="module")
def pair() -> Any:
    with Session(ranks=2, timeout=30) as session:
        yield session


@settings(phases=PHASES)
@given(
    shape=st.lists(st.integers(0, 5), max_size=4), dtype=st.sampled_from(DTYPES),
    sent_as=st.sampled_from(LAYOUTS), received_as=st.sampled_from(LAYOUTS),
    anyone=st.booleans(), seed=st.integers(0, 100),
)
def test_a_tensor_of_any_dtype_and_layout_arrives(
    pair: Session, shape: list[int], dtype: torch.dtype, sent_as: str, received_as: str,
    anyone: bool, seed: int,
) -> None:
    if received_as == "expanded":
        received_as = "strided"  # nothing can be written into an expanded tensor

    def transfer(comm: Comm) -> bytes | None:
        if comm.rank == 0:
            comm.send(laid_out(shape, dtype, sent_as, seed), 1)
            return None
        into = laid_out(shape, dtype, received_as, seed + 1)
        assert comm.recv(into, None if anyone else 0) == 0
        return raw(into)

    result = pair.run(transfer)
    oracle = laid_out(shape, dtype, sent_as, seed)
    assert result.values[1] == raw(oracle)
    assert result.trace.sent_bytes(0) == result.trace.received_bytes(1) == oracle.nbytes
    assert result.trace.messages() == 1


@settings(phases=PHASES)
@given(things=st.lists(st.one_of(
    st.none(), st.integers(), st.text(max_size=400), st.binary(max_size=3000),
    st.lists(st.floats(allow_nan=False), max_size=200), st.dictionaries(st.text(), st.booleans()),
), min_size=1, max_size=6))
def test_objects_arrive_in_order_whatever_their_size(pair: Session, things: list[Any]) -> None:
    def transfer(comm: Comm) -> list[Any] | None:
        if comm.rank == 0:
            for work in [comm.isend(thing, 1) for thing in things]:
                work.wait()
            return None
        inbox: list[Any] = []
        for work in [comm.irecv(inbox, 0) for _ in things]:
            work.wait()
        return inbox

    assert pair.run(transfer).values[1] == things


def test_objects_waited_for_out_of_order_keep_their_payloads(pair: Session) -> None:
    def transfer(comm: Comm) -> list[Any] | None:
        if comm.rank == 0:
            comm.exchange(Send("a" * 1000, 1), Send("b" * 2000, 1), Send("c", 1))
            return None
        boxes: list[list[Any]] = [[], [], []]
        works = [comm.irecv(box, 0) for box in boxes]
        for work in reversed(works):
            assert work.wait() == 0
            assert work.wait() == 0  # a second wait is free
        return [box[0][0] * 2 + str(len(box[0])) for box in boxes]

    assert pair.run(transfer).values[1] == ["aa1000", "bb2000", "cc1"]


def test_functions_and_tensors_in_objects_arrive(pair: Session) -> None:
    def transfer(comm: Comm) -> float | None:
        if comm.rank == 0:
            by = 3
            comm.send({"f": lambda x: x * by, "x": torch.ones(10_000)}, 1)
            return None
        got = comm.recv_object()
        return got["f"](got["x"]).sum().item()

    assert pair.run(transfer).values[1] == 30_000


def test_messages_of_a_pair_keep_their_order_also_if_the_ledger_has_no_room_for_them(
    pair: Session
) -> None:
    def many(comm: Comm) -> list[float] | None:
        sizes = [1 + n % 7 for n in range(300)]
        if comm.rank == 0:
            for work in [comm.isend(torch.full((size,), n), 1) for n, size in enumerate(sizes)]:
                work.wait()
            return None
        into = [torch.empty(size, dtype=torch.int64) for size in sizes]
        for work in [comm.irecv(x, 0) for x in into]:
            work.wait()
        return [x[-1].item() for x in into]

    assert pair.run(many).values[1] == list(range(300))


def test_a_send_waits_for_its_receiver_even_with_nothing_to_carry(pair: Session) -> None:
    def rendezvous(comm: Comm) -> float:
        began = comm.now()
        if comm.rank == 0:
            comm.send(torch.empty(0), 1)
        else:
            time.sleep(0.3)
            comm.recv(torch.empty(0), 0)
        return comm.now() - began

    result = pair.run(rendezvous)
    assert result.values[0] >= 0.25
    assert result.trace.messages() == 1
    assert result.trace.sent_bytes() == 0


def test_split_traffic_under_way_never_mixes_with_its_parent(pair: Session) -> None:
    """Parent, child and grandchild have messages of one pair under way at the same time, and are
    received in another order than sent."""

    def mixed(comm: Comm) -> list[float] | None:
        child = comm.split(0)
        assert child is not None
        grandchild = child.split(0)
        assert grandchild is not None
        comms = [comm, child, grandchild]
        if comm.rank == 0:
            works = [c.isend(torch.tensor([10.0 * n + k]), 1)
                     for k in range(3) for n, c in enumerate(comms)]
            works += [c.isend(f"object {n}", 1) for n, c in enumerate(comms)]
            for work in works:
                work.wait()
            return None
        got: list[Any] = []
        for n in (2, 0, 1):
            for _ in range(3):
                x = torch.empty(1)
                comms[n].recv(x, None if n == 1 else 0)
                got.append(x.item())
        got += [comms[n].recv_object(0) for n in (1, 2, 0)]
        return got

    assert pair.run(mixed).values[1] == [
        20.0, 21.0, 22.0, 0.0, 1.0, 2.0, 10.0, 11.0, 12.0, "object 1", "object 2", "object 0"]


def test_many_splits_stay_apart(pair: Session) -> None:
    """More contexts than the match check can tell apart: it must then be silent, not wrong."""

    def deep(comm: Comm) -> float:
        comms: list[Comm] = [comm]
        for _ in range(20):
            comms.append(comms[-1].split(0))  # type: ignore[arg-type]
        peer, total = 1 - comm.rank, 0.0
        for n, c in enumerate(reversed(comms)):
            x = torch.empty(n + 1)
            c.sendrecv(torch.full((n + 1,), float(n)), peer, x, peer)
            total += x[0].item()
        return total

    assert pair.run(deep).values == [210.0, 210.0]


def test_threads_of_one_rank_may_all_send(pair: Session) -> None:
    def threaded(comm: Comm) -> list[float] | None:
        x, got = torch.empty(1), []
        if comm.rank == 0:
            with ThreadPoolExecutor(20) as pool:
                list(pool.map(lambda n: comm.send(torch.tensor([float(n)]), 1), range(20)))
            return None
        for _ in range(20):
            comm.recv(x, 0)
            got.append(x.item())
        return sorted(got)

    assert pair.run(threaded).values[1] == list(range(20))


def test_tensors_that_require_grad_and_parameters_travel(pair: Session) -> None:
    def transfer(comm: Comm) -> Any:
        if comm.rank == 0:
            comm.send(torch.nn.Parameter(torch.ones(3, 2)).t(), 1)
            return None
        weight = torch.nn.Parameter(torch.zeros(2, 3))
        comm.recv(weight, 0)
        return weight.sum().item(), weight.requires_grad

    assert pair.run(transfer).values[1] == (6.0, True)
