"""Keys belong to their names, in whatever order a worker gives them; what is owed is named."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dtlab
from dtlab import Comm, ps
from dtlab.ps.partition import stable_hash
from tests.ps.shared import on_workers

BACKENDS: dict[str, Callable[..., dtlab.Result]] = {
    "simulated": lambda fn, p: dtlab.simulate(fn, network=dtlab.topology.uniform(p, 1e-6, 1e9)),
    "processes": lambda fn, p: dtlab.run(fn, ranks=p, timeout=30),
}


@pytest.mark.parametrize("partition", [ps.Range(), ps.Hash(), ps.ConsistentHash()])
@pytest.mark.parametrize("replicas", [0, 1])
def test_workers_may_name_keys_in_any_order(partition: ps.Partition, replicas: int) -> None:
    servers = 2 * (replicas + 1)

    @on_workers(servers=servers, partition=partition, replicas=replicas, update=ps.SGD(lr=1.0))
    def train(node: ps.Node) -> Any:
        shapes = {"a": (3,), "b": (2, 3), "c": (3,)}
        keys = {key: torch.full(shape, 1.0 + i) for i, (key, shape) in enumerate(shapes.items())}
        order = [[*"abc"], [*"cab"], [*"bca"]][node.comm.rank % 3]
        node.init({key: keys[key] for key in order}, tables=["b"])
        node.push({key: torch.full_like(keys[key], 0.25) for key in order if key != "b"})
        node.push_rows("b", [1], torch.full((1, 3), 0.5))
        node.clock()
        return {key: value.tolist() for key, value in node.pull(order[::-1]).items()}

    for value in BACKENDS["simulated"](train, servers + bool(replicas) + 3).values[-3:]:
        assert value == {"a": [0.75] * 3, "b": [[2.0] * 3, [1.5] * 3], "c": [2.75] * 3}


@pytest.mark.parametrize("late", [1, 2])
def test_a_key_of_one_worker_alone_is_refused_whoever_comes_first(late: int) -> None:
    def train(comm: Comm) -> None:
        node = ps.join(comm)
        if node.is_server:
            node.serve()
            return
        if comm.rank == late:
            with comm.compute("late", 1.0):
                pass
        node.init({"w": torch.zeros(3)} | ({"v": torch.ones(2)} if comm.rank == 2 else {}))
        node.finish()

    with pytest.raises(dtlab.ConfigError, match="rank 2 makes the key 'v' in init, but rank 1 doe"):
        BACKENDS["simulated"](train, 3)


@pytest.mark.parametrize("keys", [
    (1, np.int64(1), True, 1.0, np.bool_(True)), ("w", np.str_("w")), (0.5, np.float64(0.5)),
    ((1, "w"), (np.int32(1), np.str_("w"))), (frozenset({1, 2}), frozenset({np.int8(2), 1}))])
def test_keys_that_are_equal_have_one_place(keys: tuple[Any, ...]) -> None:
    assert len({*keys}) == 1
    assert len({stable_hash(key) for key in keys}) == 1

    @on_workers(servers=3)
    def train(node: ps.Node) -> Any:
        node.init({keys[node.comm.rank % len(keys)]: torch.full((4,), 7.0)})
        return node.pull([keys[0]])[keys[-1]].tolist()

    assert BACKENDS["simulated"](train, 5).values[3:] == [[7.0] * 4] * 2


def test_places_of_plain_keys_are_what_they_were() -> None:
    for key in ("w", "layer.0", 7, -3, (1, "a"), ("x",), b"k", 2.5, None):
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
        assert stable_hash(key) == int.from_bytes(digest, "little")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("colocated", [False, True])
def test_a_worker_that_forgets_finish_is_told(backend: str, colocated: bool) -> None:
    def train(comm: Comm) -> None:
        node = ps.join(comm, colocated=colocated)
        if node.is_server:
            node.serve()
            return
        node.init({"a": torch.zeros(3)})
        node.pull(["a"])
        if comm.rank != 1:
            node.finish()

    says = r"rank 1 returned without calling finish\(\)"
    with pytest.raises((dtlab.UnwaitedWork, dtlab.Deadlock), match=says):
        BACKENDS[backend](train, 3)


def test_keys_of_numpy_in_another_order_than_the_first_workers() -> None:
    @on_workers(update=ps.SGD(lr=1.0))
    def train(node: ps.Node) -> Any:
        keys = [np.int64(5), ("x", (2, 3)), np.longdouble(2)][:: 1 if node.comm.rank == 1 else -1]
        node.init({key: torch.zeros(()) for key in keys})
        node.push({5: torch.ones(())})
        node.clock()
        return [float(x) for x in node.pull([("x", (2, 3)), 5, 2]).values()]

    assert BACKENDS["simulated"](train, 3).values[1:] == [[0.0, -1.0, 0.0]] * 2


@pytest.mark.parametrize(("key", "shape", "tables", "why"), [
    (float("nan"), (2,), [], "init's key nan is another one in another process"),
    (object(), (2,), [], "is another one in another process; take a name"),
    ("t", (4, 0), ["t"], r"the rows of the table 't', \(4, 0\), have no elements"),
])
def test_keys_that_no_server_could_hold_are_refused(key: Any, shape: tuple[int, ...],
                                                    tables: list[str], why: str) -> None:
    def train(comm: Comm) -> None:
        node = ps.join(comm)
        if node.is_server:
            node.serve()
        else:
            node.init({key: torch.zeros(shape)}, tables=tables)

    with pytest.raises(dtlab.RankFailed, match=f"ConfigError: rank 1: .*{why}"):
        BACKENDS["simulated"](train, 2)
