"""Wires lie in shared memory between processes, and travel in the simulator: the same arrives."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from dtlab import Comm, ps, run, simulate
from dtlab.processes import shelf
from dtlab.ps.mail import Mail
from dtlab.topology import uniform
from tests.travelling import travelling

NETWORK = uniform(2, 1e-6, 1e9)


def odd_wires() -> list[torch.Tensor]:
    """Flat tensors that differ in dtype, length and how they lie in memory."""
    wave = torch.tensor([1 + 2j, 3 - 1j])
    return [torch.arange(5.0)[::2], torch.tensor([True, False, True]), torch.zeros(0),
            wave.conj(), wave.conj().imag, torch.ones(1).expand(3), torch.tensor([7]).expand(1),
            torch.arange(3, dtype=torch.bfloat16), torch.arange(9).to(torch.uint16),
            torch.full((2,), 0.5, requires_grad=True)]


def letter(comm: Comm, wires: list[torch.Tensor]) -> list[list[complex]]:
    """What rank 1 has of a letter from rank 0."""
    mail = Mail(comm)
    if comm.rank == 0:
        mail.send(1, ("hello",), wires)
        mail.send(1, ("end",))
        mail.flush()
        return []
    src, body, found, works, _ = mail.receive()
    for work in works:
        work.wait()
    assert (src, body) == (0, ("hello",))
    assert [x.dtype for x in found] == [x.dtype for x in wires]
    assert mail.moved_bytes == (sum(x.nbytes for x in wires), 0)
    mail.receive()
    return [x.tolist() for x in found]


@pytest.mark.parametrize("wires", [odd_wires(), [torch.zeros(0)], [torch.arange(1024.0)],
                                   [torch.arange(1025.0)], [torch.zeros(0), torch.ones(5000)], []])
def test_a_letter_brings_its_wires(wires: list[torch.Tensor]) -> None:
    sent = [x.tolist() for x in wires]
    assert run(letter, wires, ranks=2).values[1] == sent
    assert simulate(letter, wires, network=NETWORK).values[1] == sent


def test_training_is_the_same_bit_for_bit() -> None:
    def train(comm: Comm) -> list[float]:
        node = ps.join(comm, consistency=ps.BSP(), update=ps.Adam(lr=0.1))
        if node.is_server:
            node.serve()
            return []
        node.init({"small": torch.zeros(7), "large": torch.zeros(3000),
                   "half": torch.zeros(2, 3, dtype=torch.bfloat16)})
        for step in range(5):
            w = node.pull(["small", "large", "half"])
            node.push({key: x * 0.5 + step + comm.rank for key, x in w.items()})
            node.clock()
        last = node.pull(["small", "large", "half"])
        node.finish()
        return [x.double().sum().item() for x in last.values()]

    here = run(train, ranks=3).values
    assert here == simulate(train, network=uniform(3, 1e-6, 1e9)).values


RULES = [ps.SGD(lr=0.1), ps.SGD(lr=0.1, momentum=0.9), ps.Adam(), ps.StalenessAwareSGD(),
         ps.DCASGD(), ps.DCASGD(adaptive=True), ps.EASGD(), ps.FedAvg()]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("consistency", "ranks"), [(ps.BSP(), 3), (ps.ASP(), 2)])
def test_what_is_pushed_from_a_room_is_its_workers_again_once_answered(
    rule: ps.Update, consistency: ps.Consistency, ranks: int, shared: bool,
) -> None:
    """The server reads it where it is; so neither may change it, nor read it later."""
    def train(comm: Comm, spoil: bool, weight: float) -> list[float]:
        comm = comm if shared else travelling(comm)
        node = ps.join(comm, consistency=consistency, update=rule)
        if node.is_server:
            node.serve()
            return []
        keys = {"w": torch.zeros(30_000), "b": torch.zeros(5), "table": torch.zeros(400, 70)}
        node.init(keys, tables=["table"])
        room, weights = node.buffer(keys), node.buffer(keys)
        for step in range(4):
            node.pull(weights, out=weights)
            for key, g in room.items():
                g.copy_(weights[key] * 0.5 + step + comm.rank)
            before = {key: g.clone() for key, g in room.items()}
            node.push(room, weight)
            assert all(torch.equal(g, before[key]) for key, g in room.items())
            for g in room.values():
                g.fill_(torch.inf if spoil else 0)
            node.clock()
        node.pull(weights, out=weights)
        node.finish()
        return [x.double().sum().item() for x in weights.values()]

    for weight in (1.0, 3.0):
        here = run(train, True, weight, ranks=ranks).values
        assert here == simulate(train, False, weight, network=uniform(ranks, 1e-6, 1e9)).values


def test_the_answer_to_a_push_from_a_room_comes_once_it_has_been_read() -> None:
    """Adding 16 MB takes longer than telling the worker so."""
    def train(comm: Comm) -> list[float]:
        node = ps.join(comm, consistency=ps.ASP(), update=ps.SGD(lr=1.0))
        if node.is_server:
            node.serve()
            return []
        node.init({"w": torch.zeros(4_000_000)})
        room = node.buffer(["w"])
        for _ in range(5):
            room["w"].fill_(-1)
            node.push(room)
            room["w"].fill_(torch.inf)
        w = node.pull(["w"])["w"]
        node.finish()
        return [w.min().item(), w.max().item()]

    assert run(train, ranks=2).values[1] == [5.0, 5.0]


@pytest.mark.skipif(not shelf.POSSIBLE, reason="no shared memory of this kind here")
def test_a_push_from_a_room_is_not_copied() -> None:
    def work(comm: Comm) -> list[bool]:
        here: Any = comm.end.shelf  # type: ignore[attr-defined]
        lay, gifts = here.lay, []

        def watched(x: torch.Tensor) -> Any:
            laid = lay(x)
            gifts.append(laid[1] if laid else None)
            return laid

        here.lay = watched
        node = ps.join(comm, consistency=ps.ASP(), update=ps.SGD(lr=0.1))
        if node.is_server:
            node.serve()
            return gifts
        node.init({"w": torch.zeros(50_000)})
        gifts.clear()
        room = node.buffer(["w"])
        room["w"].fill_(1)
        node.push(room)
        node.push({"w": torch.ones(50_000)})
        node.finish()
        return gifts

    assert run(work, ranks=2).values[1] == [False, True]


def test_keys_move_between_servers_whose_weights_are_shown() -> None:
    """A server that gives up its weights may use their memory again; who has them keeps a copy."""
    def work(comm: Comm) -> list[float]:
        node = ps.join(comm, servers=2, active=1, consistency=ps.BSP(), update=ps.SGD(lr=1.0))
        if node.is_server:
            node.serve()
            return []
        keys = {f"w{i}": torch.full((30_000,), float(i)) for i in range(6)}
        node.init(keys)
        for step in range(6):
            node.use_servers(1 + step % 2)
            w = node.pull(keys)
            node.push({key: torch.full_like(x, -1) for key, x in w.items()})
            node.clock()
        w = node.pull(keys)
        node.finish()
        return [x.sum().item() / 30_000 for x in w.values()]

    found = run(work, ranks=4).values
    assert found == [[], [], [6.0 + i for i in range(6)], [6.0 + i for i in range(6)]]


@pytest.mark.parametrize("colocated", [False, True])
def test_a_server_that_has_ended_keeps_no_memory(colocated: bool) -> None:
    """Not even until the garbage collector comes: in a Session that may be late."""
    def train(comm: Comm) -> bool:
        gc.disable()
        node = ps.join(comm, consistency=ps.ASP(), update=ps.SGD(lr=0.1), colocated=colocated)
        if node.is_server:
            node.serve()
        else:
            node.init({"w": torch.zeros(100_000)})
            node.push({"w": torch.ones(100_000)})
            node.pull(["w"])
            node.finish()
        if node._server is None:
            return True
        left = weakref.ref(node), weakref.ref(node._server.store)
        del node
        return left[0]() is None and left[1]() is None

    assert all(run(train, ranks=3).values)


def test_weights_stay_until_they_are_read_though_their_server_has_ended() -> None:
    """A worker that finishes before it has read what it pulled, while the server goes on."""
    def train(comm: Comm) -> list[float]:
        node = ps.join(comm, consistency=ps.ASP(), update=ps.SGD(lr=0.1))
        if node.is_server:
            node.serve()
            del node
            for _ in range(20):  # whatever is free now, is used
                comm.end.shelf.empty(torch.float32, 50_000).fill_(-1)  # type: ignore[attr-defined]
            comm.send(torch.ones(1), 1)
            return []
        node.init({"w": torch.full((50_000,), 3.0)})
        handle = node.pull_async(["w"])
        box: Any = comm.end.post  # type: ignore[attr-defined]
        read = box._next

        def only_when_it_is_over() -> int:
            box._next = read
            comm.recv(torch.ones(1), 0)
            return int(read())

        box._next = only_when_it_is_over
        node.finish()
        return handle.wait()["w"].unique().tolist()  # type: ignore[no-any-return]

    assert run(train, ranks=2).values[1] == [3.0]
