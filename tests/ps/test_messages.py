"""Messages between nodes: what is sent arrives, nothing else changes, nothing is left behind."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch

from dtlab import Comm, ConfigError, ps, run, simulate
from dtlab.ps.messages import Endpoint
from dtlab.topology import uniform
from tests.ps.shared import on_workers

NETWORK = uniform(2, 1e-6, 1e9)


def odd_tensors() -> list[torch.Tensor]:
    """Flat tensors that differ in dtype, length and how they lie in memory."""
    wave = torch.tensor([1 + 2j, 3 - 1j])
    return [torch.arange(5.0)[::2], torch.tensor([True, False, True]), torch.zeros(0),
            wave.conj(), wave.conj().imag, torch.ones(1).expand(3), torch.tensor([7]).expand(1),
            torch.arange(3, dtype=torch.bfloat16), torch.arange(9).to(torch.uint16),
            torch.full((2,), 0.5, requires_grad=True)]


def send_and_receive(comm: Comm, payload: list[torch.Tensor]) -> list[list[complex]]:
    """What rank 1 receives of a message from rank 0."""
    endpoint = Endpoint(comm, [1 - comm.rank])
    if comm.rank == 0:
        endpoint.send(1, ("hello",), payload)
        endpoint.send(1, ("end",))
        endpoint.close()
        return []
    message = endpoint.receive()
    assert message is not None
    src, body, found = message
    assert (src, body) == (0, ("hello",))
    assert [x.dtype for x in found] == [x.dtype for x in payload]
    assert endpoint.received_bytes == sum(x.nbytes for x in payload)
    endpoint.receive()
    endpoint.close()
    return [x.tolist() for x in found]


@pytest.mark.parametrize("payload", [odd_tensors(), [torch.zeros(0)], [torch.arange(1024.0)],
                                   [torch.arange(1025.0)], [torch.zeros(0), torch.ones(5000)], []])
def test_a_message_brings_its_payload(payload: list[torch.Tensor]) -> None:
    sent = [x.tolist() for x in payload]
    assert run(send_and_receive, payload, ranks=2).values[1] == sent
    assert simulate(send_and_receive, payload, network=NETWORK).values[1] == sent


def test_what_a_peer_that_never_answers_has_received_is_let_go() -> None:
    def lent(comm: Comm) -> int:
        endpoint, xs = Endpoint(comm, [1 - comm.rank]), [torch.ones(3) for _ in range(400)]
        for x in xs:
            if comm.rank == 0:
                endpoint.send(1, ("push",), [x])
                comm.recv_object(1)
            else:
                endpoint.receive()
                comm.send("read", 0)
        for _ in range(1000):  # a machine that is busy may notice later that a message has moved
            count = sum(map(endpoint.is_sending, xs))
            if comm.rank or count < 200:
                break
            time.sleep(0.01)
            endpoint._release_moved(1)
        endpoint.close()
        return count

    assert run(lent, ranks=2).values[0] < 200
    assert simulate(lent, network=NETWORK).values[0] < 200


def test_training_is_the_same_bit_for_bit() -> None:
    @on_workers({"small": torch.zeros(7), "large": torch.zeros(3000),
                 "half": torch.zeros(2, 3, dtype=torch.bfloat16)}, update=ps.Adam(lr=0.1))
    def train(node: ps.Node) -> list[float]:
        for step in range(5):
            w = node.pull(["small", "large", "half"])
            node.push({key: x * 0.5 + step + node.comm.rank for key, x in w.items()})
            node.clock()
        return [x.double().sum().item() for x in node.pull(["small", "large", "half"]).values()]

    here = run(train, ranks=3).values[1:]
    assert here == simulate(train, network=uniform(3, 1e-6, 1e9)).values[1:]


RULES = [ps.SGD(lr=0.1), ps.SGD(lr=0.1, momentum=0.9), ps.Adam(), ps.StalenessAwareSGD(),
         ps.DCASGD(), ps.DCASGD(adaptive=True), ps.EASGD(), ps.FedAvg()]


def train_reusing(comm: Comm, rule: ps.Update, consistency: ps.Consistency, spoil: bool,
                  weight: float) -> list[float]:
    """Each step pushes the same buffer, which is overwritten as soon as the push is answered."""
    node = ps.join(comm, consistency=consistency, update=rule)
    if node.is_server:
        node.serve()
        return []
    keys = {"w": torch.zeros(30_000), "b": torch.zeros(5), "table": torch.zeros(400, 70)}
    node.init(keys, tables=["table"])
    buffer, weights = node.buffer(keys), node.buffer(keys)
    for step in range(4):
        node.pull(weights, out=weights)
        for key, g in buffer.items():
            g.copy_(weights[key] * 0.5 + step + comm.rank)
        before = {key: g.clone() for key, g in buffer.items()}
        node.push(buffer, weight)
        assert all(torch.equal(g, before[key]) for key, g in buffer.items())
        for g in buffer.values():
            g.fill_(torch.inf if spoil else 0)
        node.clock()
    node.pull(weights, out=weights)
    node.finish()
    return [x.double().sum().item() for x in weights.values()]


@pytest.mark.parametrize(("consistency", "ranks"), [(ps.BSP(), 3), (ps.ASP(), 2)])
def test_a_buffer_may_be_reused_once_its_push_is_answered(
    consistency: ps.Consistency, ranks: int
) -> None:
    """The server neither changes it nor reads it later."""
    def each(comm: Comm, spoil: bool) -> dict[str, list[float]]:
        return {f"{rule}, weight {weight}": train_reusing(comm, rule, consistency, spoil, weight)
                for rule in RULES for weight in (1.0, 3.0)}

    here = run(each, True, ranks=ranks).values
    assert here == simulate(each, False, network=uniform(ranks, 1e-6, 1e9)).values


def test_a_push_is_answered_once_it_has_been_read() -> None:
    """Adding 16 MB takes longer than telling the worker so."""
    @on_workers({"w": torch.zeros(4_000_000)}, consistency=ps.ASP(), update=ps.SGD(lr=1.0))
    def train(node: ps.Node) -> list[float]:
        buffer = node.buffer(["w"])
        for _ in range(5):
            buffer["w"].fill_(-1)
            node.push(buffer)
            buffer["w"].fill_(torch.inf)
        w = node.pull(["w"])["w"]
        return [w.min().item(), w.max().item()]

    assert run(train, ranks=2).values[1] == [5.0, 5.0]


def test_keys_move_while_their_weights_are_being_sent() -> None:
    """A server that gives up its weights changes none that a worker has pulled."""
    @on_workers(servers=2, active=1, consistency=ps.BSP(), update=ps.SGD(lr=1.0))
    def work(node: ps.Node) -> list[float]:
        keys = {f"w{i}": torch.full((30_000,), float(i)) for i in range(6)}
        node.init(keys)
        for step in range(6):
            node.use_servers(1 + step % 2)
            w = node.pull(keys)
            node.push({key: torch.full_like(x, -1) for key, x in w.items()})
            node.clock()
        w = node.pull(keys)
        return [x.sum().item() / 30_000 for x in w.values()]

    assert run(work, ranks=4).values[2:] == [[6.0 + i for i in range(6)]] * 2


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


def test_what_was_answered_before_finish_may_be_waited_for_after_it() -> None:
    def train(comm: Comm) -> bool:
        node = ps.join(comm, consistency=ps.ASP(), update=ps.SGD(lr=0.1))
        if node.is_server:
            node.serve()
            return True
        node.init({"w": torch.zeros(3)})
        done, late = node.pull_async(["w"]), node.pull_async(["w"])
        node.finish()  # whose answers come after these
        return done.wait()["w"].tolist() == late.wait()["w"].tolist() == [0.0] * 3

    assert all(simulate(train, network=NETWORK).values)


def test_a_worker_may_finish_while_its_pull_is_held() -> None:
    def train(comm: Comm) -> bool:
        node = ps.join(comm, update=ps.SGD(lr=0.1))
        if node.is_server:
            node.serve()
            return True
        node.init({"w": torch.zeros(3)})
        if comm.rank == 1:
            node.clock()
            held = node.pull_async(["w"])  # until rank 2 has passed a clock
            node.finish()
            with pytest.raises(ConfigError, match="after finish"):
                held.wait()
            return True
        with comm.compute("slow", seconds=1.0):
            pass
        node.clock()
        node.pull(["w"])
        node.finish()
        return True

    assert all(simulate(train, network=uniform(3, 1e-6, 1e9)).values)


def test_what_two_servers_of_two_groups_say_does_not_mix() -> None:
    """Groups of ranks, each with a server of its own, and two servers for all of them at once."""
    def train(comm: Comm) -> list[float]:
        half = comm.subgroup(range(2) if comm.rank < 2 else range(2, 4))
        nodes = [ps.join(half, consistency=ps.ASP(), update=ps.SGD(lr=1.0)) for _ in range(2)]
        for step, node in enumerate(nodes, 1):
            if node.is_server:
                node.serve()
                continue
            node.init({"w": torch.zeros(1)})
            node.push({"w": torch.full((1,), -float(step * comm.rank))})
            assert node.pull(["w"])["w"].item() == step * comm.rank
            node.finish()
        return [node.comm.size for node in nodes]

    wanted = [[2, 2]] * 4
    assert simulate(train, network=uniform(4, 1e-6, 1e9)).values == wanted
    assert run(train, ranks=4).values == wanted
