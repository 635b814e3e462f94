"""Which server holds what: all of it, once, evenly, and the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dtlab import Comm, ConfigError, ps, run, simulate
from dtlab.ps.partition import Shards, Spec, common, positions, stable_hash
from dtlab.topology import uniform

PARTITIONS = [ps.Range(), ps.Hash(), ps.ConsistentHash()]


def many_keys(count: int) -> dict[Any, Spec]:
    return {f"layer{i}": Spec((7, 3), torch.float32) for i in range(count)}


def load(placement: Shards, specs: dict[Any, Spec]) -> Counter[int]:
    found: Counter[int] = Counter()
    for key, pieces in placement.items():
        for server, units in pieces:
            found[server] += len(units) * specs[key].width
    return found


shapes = st.lists(st.integers(0, 9), max_size=2).map(tuple)


@given(partition=st.sampled_from(PARTITIONS), servers=st.integers(1, 9),
       given_shapes=st.lists(st.tuples(shapes, st.booleans()), max_size=6))
@example(partition=ps.Range(), servers=1, given_shapes=[((1, 0), True)])
def test_every_unit_is_on_exactly_one_server(
    partition: ps.Partition, servers: int, given_shapes: list[tuple[tuple[int, ...], bool]]
) -> None:
    specs = {f"k{i}": Spec(shape, torch.float32, table and len(shape) > 0)
             for i, (shape, table) in enumerate(given_shapes)}
    placement = partition.place(specs, range(servers))
    for key, spec in specs.items():
        units = [np.asarray(piece, dtype=np.int64) for _, piece in placement[key]]
        assert sorted(np.concatenate(units)) == list(range(spec.units))


@pytest.mark.parametrize("servers", [1, 2, 3, 5, 8])
def test_ranges_are_equal_to_the_element(servers: int) -> None:
    specs = {"a": Spec((1000,), torch.float32), "b": Spec((3,), torch.float32),
             "c": Spec((77, 7), torch.float32)}
    loads = load(ps.Range().place(specs, range(servers)), specs)
    assert max(loads.values()) - min(loads.values()) <= 1


@pytest.mark.parametrize(("partition", "most"), [(ps.Hash(), 1.2), (ps.ConsistentHash(), 1.6)])
def test_hashing_spreads_many_keys(partition: ps.Partition, most: float) -> None:
    specs = many_keys(4000)
    loads = load(partition.place(specs, range(4)), specs)
    assert max(loads.values()) < most * sum(loads.values()) / 4


def test_more_virtual_nodes_even_out_the_ring() -> None:
    specs = many_keys(4000)

    def spread(vnodes: int) -> float:
        loads = load(ps.ConsistentHash(vnodes).place(specs, range(8)), specs)
        return max(loads.values()) * 8 / sum(loads.values())

    assert spread(512) < spread(64) < spread(1)


@pytest.mark.parametrize("servers", [1, 2, 4, 9])
def test_consistent_hashing_moves_only_what_the_new_server_takes(servers: int) -> None:
    """About 1/(n+1) of the keys, all of them to the new server; nothing between old ones."""
    specs = many_keys(4000) | {"table": Spec((3000, 2), torch.float32, table=True)}
    partition = ps.ConsistentHash(vnodes=256)
    before, after = (owners(partition.place(specs, range(n)), specs)
                     for n in (servers, servers + 1))
    moved = [unit for unit in before if before[unit] != after[unit]]
    assert {after[unit] for unit in moved} == {servers}
    assert 0.5 / (servers + 1) < len(moved) / len(before) < 1.6 / (servers + 1)


def test_plain_hashing_moves_most_keys() -> None:
    specs = many_keys(2000)
    before, after = (owners(ps.Hash().place(specs, range(n)), specs) for n in (4, 5))
    moved = sum(before[unit] != after[unit] for unit in before)
    assert 0.7 < moved / len(before) < 0.9  # 4/5


def owners(placement: Shards, specs: dict[Any, Spec]) -> dict[Any, int]:
    """Server of each key, and of each row of a table."""
    found = {}
    for key, pieces in placement.items():
        for server, units in pieces:
            if specs[key].table:
                found |= {(key, int(unit)): server for unit in units}
            else:
                found[key] = server
    return found


def test_hashes_are_the_same_in_another_process() -> None:
    keys = ["w", ("layer", 3), 17]
    code = f"from dtlab.ps.partition import stable_hash; print([stable_hash(k) for k in {keys!r}])"
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    there = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True,
                           text=True, check=True).stdout
    assert there.strip() == str([stable_hash(key) for key in keys])


@given(a=st.sets(st.integers(0, 30)), lo=st.integers(0, 30), n=st.integers(0, 30))
def test_pieces_meet_as_sets_do(a: set[int], lo: int, n: int) -> None:
    array, span = np.array(sorted(a), dtype=np.int64), range(lo, lo + n)
    both = common(array, span)
    assert set(np.asarray(both).tolist()) == a & set(span)
    assert set(common(range(5, 20), span)) == set(range(5, 20)) & set(span)
    assert array[positions(both, array).numpy()].tolist() == list(both)


# ---- servers come and go ------------------------------------------------------------------------


def train(comm: Comm, partition: ps.Partition, plan: dict[int, Any], update: ps.Update) -> Any:
    """`plan`: before which step, which servers shall hold the keys."""
    node = ps.join(comm, servers=3, active=2, partition=partition, update=update)
    if node.is_server:
        return node.serve()
    node.init({f"k{i}": torch.full((5,), float(i), dtype=torch.float64) for i in range(20)}
              | {"table": torch.ones(40, 3, dtype=torch.float64)}, tables=["table"])
    keys = [f"k{i}" for i in range(20)]
    for step in range(6):
        if step in plan:
            node.use_servers(plan[step])
        weights = node.pull(keys)
        rows = [step, 7, 30 + comm.rank]
        table = node.pull_rows("table", rows)
        node.push({key: (w - comm.rank).sin() for key, w in weights.items()})
        node.push_rows("table", rows, table.cos())
        node.clock()
    last = node.pull([*keys, "table"])
    node.finish()
    return last


@pytest.mark.parametrize("update", [ps.SGD(0.1, momentum=0.9), ps.Adam(0.1)], ids=repr)
@pytest.mark.parametrize("partition", PARTITIONS, ids=repr)
def test_training_goes_on_as_if_no_server_had_come_or_gone(
    partition: ps.Partition, update: ps.Update
) -> None:
    network = uniform(5, 1e-6, 1e9)
    calm, moving = (simulate(lambda comm, plan=plan: train(comm, partition, plan, update),
                             network=network).values
                    for plan in ({}, {2: 3, 3: [0], 4: [1, 2], 5: [0, 1, 2]}))
    for found, wanted in zip(moving[3:], calm[3:], strict=True):
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert calm[2].held_bytes == 0
    assert all(server.held_bytes > 0 for server in moving[:3])


def test_a_new_server_gets_its_share_and_the_others_keep_theirs() -> None:
    values = simulate(lambda comm: train(comm, ps.ConsistentHash(), {3: 3}, ps.SGD(0.1)),
                      network=uniform(5, 1e-6, 1e9)).values
    assert all(server.moved > 0 for server in values[:2])
    assert values[2].moved == 0


def test_servers_come_and_go_on_processes() -> None:
    def body(comm: Comm) -> Any:
        return train(comm, ps.ConsistentHash(), {2: 3, 4: [0, 2]}, ps.Adam(0.1))

    wanted = simulate(body, network=uniform(5, 1e-6, 1e9)).values[3:]
    for found, right in zip(run(body, ranks=5).values[3:], wanted, strict=True):
        for key in right:
            torch.testing.assert_close(found[key], right[key], rtol=0, atol=1e-12)


def test_vnodes_must_be_some() -> None:
    with pytest.raises(ConfigError, match="vnodes"):
        ps.ConsistentHash(0)


@pytest.mark.parametrize("partition", [ps.Range(), ps.Hash(), ps.ConsistentHash()])
def test_no_servers_are_refused(partition: ps.Partition) -> None:
    with pytest.raises(ConfigError, match="number of servers must be a whole number, 1 or more"):
        partition.place({"w": Spec((3,), torch.float32)}, [])
