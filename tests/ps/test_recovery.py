"""Checkpoints that are torn or rotten, and workers that are lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dtlab import Comm, ConfigError, RankDied, ps, run, simulate
from dtlab.ps import Checkpoints
from dtlab.topology import uniform
from tests.ps.shared import on_workers

SERVERS = 2


def train(comm: Comm, folder: Path, steps: int, servers: int = SERVERS) -> Any:
    """`steps` iterations in all, from the last checkpoint on."""
    node = ps.join(comm, servers=servers, update=ps.Adam(lr=0.1), partition=ps.Range(),
                   checkpoints=Checkpoints(folder, every=5))
    if node.is_server:
        return node.serve()
    begin = node.init({"w": torch.arange(7, dtype=torch.float64)})
    for step in range(begin, steps):
        w = node.pull(["w"])["w"]
        node.push({"w": (w + step).sin()})
        node.clock()
    last = node.pull(["w"])["w"]
    node.finish()
    return begin, last


def trained(folder: Path, steps: int) -> tuple[int, torch.Tensor]:
    return simulate(lambda comm: train(comm, folder, steps),
                    network=uniform(SERVERS + 2, 1e-6, 1e9)).values[-1]


@pytest.fixture
def wanted(tmp_path: Path) -> torch.Tensor:
    return trained(tmp_path / "uninterrupted", 20)[1]


def test_training_goes_on_from_a_checkpoint_as_if_never_interrupted(
    tmp_path: Path, wanted: torch.Tensor
) -> None:
    """State of the rule and all: Adam's moments and its count of steps."""
    assert trained(tmp_path, 13)[0] == 0
    begin, last = trained(tmp_path, 20)
    assert begin == 10
    assert torch.equal(last, wanted)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def rot(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("server", range(SERVERS))
@pytest.mark.parametrize("harm", [tear, rot, empty, Path.unlink])
def test_a_file_that_is_not_sound_is_found_and_the_one_before_is_used(
    tmp_path: Path, harm: Any, server: int, wanted: torch.Tensor
) -> None:
    trained(tmp_path, 13)
    harm(Checkpoints(tmp_path).path(server, 10))
    begin, last = trained(tmp_path, 20)
    assert begin == 5  # on both servers, though the other's newest file is sound
    assert torch.equal(last, wanted)


def test_a_copy_that_someone_made_of_a_file_does_not_matter(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(0, 1, {})
    path.with_stem(f"{path.stem} (1)").write_bytes(path.read_bytes())
    Checkpoints(tmp_path).path(0, 2).mkdir()
    assert Checkpoints(tmp_path).newest([0]) == 1


def test_every_single_flipped_byte_is_noticed(tmp_path: Path) -> None:
    keep = Checkpoints(tmp_path)
    path = keep.save(0, 1, {"w": torch.ones(3)})
    sound = path.read_bytes()
    for place in range(0, len(sound), 7):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 0x10]) + sound[place + 1 :])
        assert keep.load(0, 1) is None
    path.write_bytes(sound)
    assert keep.load(0, 1)["w"].tolist() == [1, 1, 1]


def test_old_files_go_and_nothing_half_written_stays(tmp_path: Path) -> None:
    trained(tmp_path, 27)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"server{server}-clock{clock:08d}.ckpt" for server in range(SERVERS) for clock in (20, 25)]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, 6)

    def other(comm: Comm) -> Any:
        node = ps.join(comm, servers=SERVERS, partition=ps.Range(),
                       checkpoints=Checkpoints(tmp_path))
        return node.serve() if node.is_server else node.init({"w": torch.zeros(9)})

    with pytest.raises(ConfigError, match="another model"):
        simulate(other, network=uniform(SERVERS + 1, 1e-6, 1e9))


@pytest.mark.parametrize("servers", [1, 3])
def test_a_checkpoint_of_another_number_of_servers_is_refused(tmp_path: Path, servers: int) -> None:
    """Else keys of servers that are gone, or all of them, would begin anew."""
    trained(tmp_path, 6)
    with pytest.raises(ConfigError, match=f"servers=2, not {servers}"):
        simulate(lambda comm: train(comm, tmp_path, 7, servers), network=uniform(4, 1e-6, 1e9))


# ---- workers that are lost ----------------------------------------------------------------------


def counting(comm: Comm, lost_worker: str) -> Any:
    """Each worker pushes −1 a step, so that the weight counts clocks; worker 3 may die."""
    node = ps.join(comm, update=ps.SGD(lr=1.0), patience_s=0.1, lost_worker=lost_worker)
    if node.is_server:
        return node.serve()
    node.init({"w": torch.zeros(1)})
    for _ in range(10):
        node.pull(["w"])
        with comm.compute("step", seconds=0.01):
            pass
        node.push({"w": -torch.ones(1)})
        node.clock()
    last = node.pull(["w"])["w"].item()
    node.finish()
    return last


@pytest.mark.parametrize("events", [0, 5, 9, 14, 15, 16, 17, 18, 30])
def test_servers_go_on_without_a_worker_that_dies_if_told_to(events: int) -> None:
    values = simulate(lambda comm: counting(comm, "go on"), network=uniform(4, 1e-6, 1e9),
                      crash={3: events}, timeout=30).values
    assert values[1:3] == [10.0, 10.0]
    assert values[0].lost_workers == [3]


def test_else_the_run_ends_and_says_who_is_missing() -> None:
    with pytest.raises(RankDied, match=r"worker 3 has died or been silent for .* after \d clocks"):
        simulate(lambda comm: counting(comm, "stop"), network=uniform(4, 1e-6, 1e9),
                 crash={3: 18}, timeout=30)


def test_a_worker_that_waits_for_others_is_not_lost() -> None:
    @on_workers({"w": torch.zeros(1)}, patience_s=1.0, lost_worker="stop")
    def slow(node: ps.Node) -> None:
        for _ in range(3):
            node.pull(["w"])
            with node.comm.compute("step", seconds=0.9 if node.comm.rank == 1 else 0.0):
                pass
            node.push({"w": torch.ones(1)})
            node.clock()

    server = simulate(slow, network=uniform(3, 1e-6, 1e9), timeout=30).values[0]
    assert server.lost_workers == []


def test_a_worker_is_killed_on_processes_and_the_others_go_on() -> None:
    @on_workers({"w": torch.zeros(20_000)}, update=ps.SGD(lr=1.0), patience_s=30.0,
                lost_worker="go on")
    def dies(node: ps.Node) -> Any:
        for step in range(5):
            node.pull(["w"])
            if node.comm.rank == 3 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            node.push({"w": -torch.ones(20_000)})
            node.clock()
        last = node.pull(["w"])["w"]
        return last.min().item(), last.max().item()

    values = run(dies, ranks=4, may_die=[3]).values
    assert values[1:] == [(5.0, 5.0), (5.0, 5.0), None]
    assert values[0].lost_workers == [3]


@pytest.mark.parametrize(("how", "says"), [
    ({"patience_s": 0}, "patience_s"), ({"lost_worker": "weep"}, "lost_worker"),
    ({"checkpoints": "/tmp"}, "ps.Checkpoints"),
    ({"replicas": 1, "lease_s": 0.5, "patience_s": 1.0}, "too short .* more than 1 s"),
])
def test_choices_that_make_no_sense_are_refused(how: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        simulate(lambda comm: ps.join(comm, servers=2, **how), network=uniform(5, 1e-5, 1e9))


def test_keeping_a_single_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep the one before"):
        Checkpoints("x", keep=1)
