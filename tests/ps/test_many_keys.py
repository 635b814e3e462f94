"""Many small keys are handled together, and nothing but time tells: each key has the weights and
the history that it has by itself."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from dtlab import Comm, ps, run, simulate
from dtlab.ps import packing
from dtlab.ps.index import KeyIndex, Shard
from dtlab.ps.partition import Spec
from dtlab.ps.store import Store
from dtlab.topology import uniform
from tests.ps.shared import on_workers

WORKERS, STEPS = 3, 7
SHAPES: list[tuple[int, ...]] = [(4,), (2, 3), (), (0,), (7,), (1, 2, 2), (5,), (3,)]
CONSISTENCIES = [ps.BSP(), ps.ASP(), ps.SSP(1), ps.SoftSync(2), ps.BackupWorkers(1)]
RULES: list[ps.Update] = [
    ps.SGD(0.1, momentum=0.9), ps.Adam(0.1), ps.StalenessAwareSGD(0.1),
    ps.DCASGD(0.1, adaptive=True), ps.EASGD(0.1),
]


def start() -> dict[Any, torch.Tensor]:
    """Small keys of two dtypes, a big one and a table among them."""
    numbers = torch.Generator().manual_seed(0)
    keys: dict[Any, torch.Tensor] = {
        ("k", i): torch.randn(shape, generator=numbers, dtype=torch.float64 if i % 3 else None)
        for i, shape in enumerate(SHAPES * 2)}
    keys["big"] = torch.randn(20_000, generator=numbers)
    keys["table"] = torch.randn(6, 2, generator=numbers, dtype=torch.float64)
    return keys


def train(comm: Comm, how: dict[str, Any]) -> Any:
    """Each worker pulls and pushes some keys at each step, in any order; all at first."""
    node = ps.join(comm, **how)
    if node.is_server:
        return node.serve()
    worker = comm.rank - node.policy.workers[0]
    dice, keys = random.Random(worker), list(start())
    node.init(start(), tables=["table"])
    for step in range(STEPS):
        some = keys if step < 2 else dice.sample(keys, dice.randint(1, len(keys)))
        weights = node.pull(some)
        with comm.compute("step", seconds=1 + 0.3 * worker):
            pass
        node.push({key: w.sin() + step for key, w in weights.items() if dice.random() < 0.9})
        node.push_rows("table", [worker, 5], torch.ones(2, 2, dtype=torch.float64))
        node.clock()
    with comm.compute("the others end", seconds=100):
        pass
    last = node.pull(keys)
    node.finish()
    return last


def account(statistics: ps.Statistics) -> dict[str, Any]:
    """All that does not depend on how many bytes a message has."""
    return {name: value for name, value in vars(statistics).items()
            if name not in ("waits", "received_bytes", "sent_bytes")}


@pytest.mark.parametrize("partition", [ps.Hash(), ps.Range()], ids=repr)
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("consistency", CONSISTENCIES, ids=repr)
def test_each_key_fares_as_by_itself(
    consistency: ps.Consistency, rule: ps.Update, partition: ps.Partition,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    how = {"servers": 2, "consistency": consistency, "update": rule, "partition": partition}

    def values() -> list[Any]:
        network = uniform(2 + WORKERS, 1e-6, 1e9)
        return simulate(lambda comm: train(comm, how), network=network, trace=False).values

    found = values()
    monkeypatch.setattr(packing, "BIG_BYTES", 0)  # now no key is small
    wanted = values()
    for server in (0, 1):
        assert account(found[server]) == account(wanted[server])
    for mine, right in zip(found[2:], wanted[2:], strict=True):
        assert mine.keys() == right.keys()
        assert all(torch.equal(mine[key], w) and mine[key].dtype == w.dtype
                   for key, w in right.items())


def test_replicas_agree_on_keys_that_were_asked_for_apart() -> None:
    values = simulate(lambda comm: train(comm, {"servers": 2, "replicas": 1,
                                                "consistency": ps.ASP()}),
                      network=uniform(3 + WORKERS, 1e-6, 1e9), trace=False).values
    assert values[0].checksum == values[1].checksum != 0


@pytest.mark.parametrize("backend", ["simulator", "processes"])
@pytest.mark.parametrize("partition", [ps.Hash(), ps.Range()], ids=repr)
def test_a_room_holds_what_separate_tensors_hold(backend: str, partition: ps.Partition) -> None:
    @on_workers(start(), tables=["table"], servers=2, active=1, partition=partition,
                consistency=ps.ASP())
    def body(node: ps.Node) -> Any:
        weights, grads = node.buffer(start()), node.buffer(start())
        found = []
        for step in range(4):
            if step == 2:
                node.use_servers(2)  # where the room was cut for one
            pulled = node.pull(weights, out=weights)
            assert all(pulled[key] is weights[key] for key in weights)
            separate = node.pull(list(start()))
            assert all(torch.equal(separate[key], weights[key]) for key in weights)
            for key, g in grads.items():
                g.copy_(weights[key]).cos_()
            if step % 2:
                node.push(grads)
            else:
                node.push({key: g.clone() for key, g in grads.items()})
            found.append({key: w.clone() for key, w in separate.items()})
        return found

    values = (run(body, ranks=3) if backend == "processes"
              else simulate(body, network=uniform(3, 1e-6, 1e9))).values
    w = start()
    for found in values[2]:
        for key in w:
            torch.testing.assert_close(found[key], w[key])
            w[key] = w[key] - 0.1 * w[key].cos()


def test_a_room_of_another_node_is_as_good_as_separate_tensors() -> None:
    def body(comm: Comm) -> Any:
        room: Any = None
        found = []
        for names in ("abc", "cab"):  # the same keys at other places
            node = ps.join(comm, consistency=ps.ASP(), update=ps.SGD(1.0))
            if node.is_server:
                node.serve()
                continue
            node.init({name: torch.full((2,), float(ord(name))) for name in names})
            room = room or node.buffer(["a", "b", "c"])
            weights = node.pull(room, out=room)
            found.append([weights[name].tolist() for name in "abc"])
            for name, g in room.items():
                g.fill_(ord(name))
            node.push(room)
            found.append([w.tolist() for w in node.pull(["a", "b", "c"]).values()])
            node.finish()
        return found

    numbers, nought = [[97, 97], [98, 98], [99, 99]], [[0, 0], [0, 0], [0, 0]]
    assert simulate(body, network=uniform(2, 0, 1e9)).values[1] == [numbers, nought] * 2


def test_parameters_that_need_gradients_are_pulled_into_and_pushed() -> None:
    @on_workers(consistency=ps.ASP(), update=ps.FedAvg())
    def body(node: ps.Node) -> Any:
        start = {i: torch.nn.Parameter(torch.full((2, i + 1), float(i))) for i in range(4)}
        node.init(start)
        mine = {i: torch.nn.Parameter(torch.zeros(2, i + 1)) for i in range(4)}
        node.pull(mine, out=mine)
        sum(w.square().sum() for w in mine.values()).backward()
        gradients = [w.grad.mean().item() for w in mine.values() if w.grad is not None]
        node.push({i: w * 2 for i, w in mine.items()})
        return gradients, [w.mean().item() for w in node.pull(range(4)).values()]

    wanted = [0, 2, 4, 6]
    assert simulate(body, network=uniform(2, 0, 1e9)).values[1] == (wanted, wanted)


def test_small_keys_of_a_room_lie_end_to_end() -> None:
    def body(comm: Comm) -> Any:
        node = ps.join(comm)
        if node.is_server:
            return node.serve()
        node.init({i: torch.zeros(2, 3) for i in range(5)})
        room = node.buffer(range(5))
        node.finish()
        (part,), = room.slices.values()
        assert part.receive_buffer is not None
        return [room[i].data_ptr() - part.receive_buffer.data_ptr() for i in room]

    assert simulate(body, network=uniform(2, 0, 1e9)).values[1] == [0, 24, 48, 72, 96]


def test_a_letter_is_as_short_for_thousands_of_keys_as_for_two() -> None:
    @on_workers(consistency=ps.ASP())
    def body(node: ps.Node, keys: int, steps: int) -> None:
        node.init({f"layer{i}": torch.zeros(3) for i in range(keys)})
        for _ in range(steps):
            node.push(node.pull([f"layer{i}" for i in range(keys)]))

    def letters(keys: int) -> int:
        """The bytes that a worker sends in a step, without tensors."""
        sent = [simulate(lambda comm, steps=steps: body(comm, keys, steps),
                         network=uniform(2, 0, 1e9)).trace.bytes_by_pair()[1, 0]
                for steps in (1, 2)]
        return sent[1] - sent[0] - keys * 3 * 4

    assert letters(3000) < letters(2) + 20


def test_nan_is_dropped_key_by_key() -> None:
    @on_workers({i: torch.zeros(2) for i in range(5)}, consistency=ps.ASP(), update=ps.SGD(1.0),
                nan="drop")
    def body(node: ps.Node) -> Any:
        node.push({i: torch.tensor([1.0, float("nan") if i in (0, 3) else 1.0])
                   for i in range(5)})
        return [w.tolist() for w in node.pull(range(5)).values()]

    server, weights = simulate(body, network=uniform(2, 0, 1e9)).values
    assert weights == [[0, 0], [-1, -1], [-1, -1], [0, 0], [-1, -1]]
    assert (server.nan, server.updates) == (2, 3)


def test_what_was_saved_of_keys_with_different_histories_is_resumed(tmp_path: Path) -> None:
    @on_workers({i: torch.full((3,), float(i)) for i in range(6)}, update=ps.Adam(0.1),
                checkpoints=ps.Checkpoints(tmp_path, every=1))
    def body(node: ps.Node, steps: int) -> Any:
        for step in range(steps):
            weights = node.pull(range(6))
            node.push({i: weights[i] + 1 for i in range(6) if i % 3 <= step % 3})
            node.clock()
        return node.pull(range(6))

    def after(steps: int) -> Any:
        return simulate(lambda comm: body(comm, steps), network=uniform(2, 0, 1e9)).values[1]

    after(3)
    resumed = after(3)
    for file in tmp_path.iterdir():
        file.unlink()
    at_once = after(6)
    assert all(torch.equal(resumed[i], at_once[i]) for i in range(6))


def test_a_snapshot_holds_no_memory_twice() -> None:
    store = Store(ps.SGD(0.1))
    entry, = store.add([Shard(i, Spec((50,), torch.float32), 50) for i in range(40)])
    entry.value = torch.arange(2000.0)
    store.one_by_one()
    data = pickle.dumps(store)
    assert len(data) < 10 * 2000 * 4
    again = pickle.loads(data).one_by_one()
    assert all(torch.equal(again[key].value, entry.value)
               for key, entry in store.one_by_one().items())


def test_places_are_the_same_on_both_sides() -> None:
    """The server numbers what comes in the worker's order, and finds the same order."""
    pieces = [Shard(key, Spec(tuple(x.shape), x.dtype, key == "table"), x.numel())
              for key, x in start().items()]
    worker, server = KeyIndex(), KeyIndex()
    worker.add(pieces)
    server.add(sorted(pieces, key=lambda piece: worker.number_of[piece.key]))
    assert worker.keys == server.keys
    every = range(len(pieces))
    assert worker.runs(every) == server.runs(every)
    assert len(worker.runs(every)) == 4  # two dtypes, the big one, the table
