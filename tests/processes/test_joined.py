"""Over a process group that a script has formed: the same communicator, and no wait without end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dtlab
from dtlab import Comm, collectives
from dtlab.processes import hosts, joined, monitor
from dtlab.processes.run import launch
from dtlab.processes.status_writer import Threads
from dtlab.processes.torchrun import started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def in_group(ranks: int, script: Callable[[int, dist.Store], Any]) -> list[Any]:
    """What `script(rank, store)` returns on processes whose default group is torch's own."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank_of(comm: Comm, port: int) -> Any:
        dist.destroy_process_group()  # the launcher's
        mine = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=mine, rank=comm.rank, world_size=comm.size)
        return script(comm.rank, mine)

    return launch(rank_of, (store.port,), ranks, timeout=60, echo=True).values


def refused(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The kinds and the words of the error that `call` raises."""
    try:
        call(*args, **options)
    except dtlab.DtlabError as error:
        return f"{' '.join(kind.__name__ for kind in type(error).__mro__)}: {error}"
    raise AssertionError("not refused")


def test_groups_subgroups_and_dimensions_of_a_mesh() -> None:
    def script(rank: int, _store: dist.Store) -> None:
        comm = dtlab.from_process_group()
        assert (comm.rank, comm.size) == (rank, 4)
        assert dtlab.from_process_group() is comm
        x = collectives.all_reduce(comm, torch.tensor([rank + 1.0], dtype=torch.float64))
        assert x.item() == 10
        assert comm.begin(collectives.all_reduce, torch.ones(3)).wait().tolist() == [4.0] * 3
        half = comm.split(rank % 2)
        assert half is not None
        assert half.size == 2

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for name, sum_of_ranks in (("dp", rank % 2 * 2 + 2), ("tp", rank // 2 * 4 + 1)):
            for group in (mesh[name], mesh.get_group(name)):
                part = dtlab.from_process_group(group)
                assert part.global_ranks[part.rank] == rank
                assert collectives.all_reduce(part, torch.tensor([rank])).item() == sum_of_ranks
        assert "choose mesh.get_group('dp')" in refused(dtlab.from_process_group, mesh)
        if rank:
            assert f"rank {rank} is not in this group" in refused(
                dtlab.from_process_group, DeviceMesh("cpu", [0]))
        else:
            assert dtlab.from_process_group(DeviceMesh("cpu", [0])).size == 1
        assert "not 7" in refused(dtlab.from_process_group, 7)

        in_order = "sort_ranks" in signature(dist.new_group).parameters  # before, torch sorted
        backwards = dist.new_group([3, 1], **{"sort_ranks": False} if in_order else {})
        ranks = [3, 1] if in_order else [1, 3]
        if rank in ranks:
            part = dtlab.from_process_group(backwards)
            assert part.rank == ranks.index(rank)
            assert collectives.all_gather(part, torch.tensor([rank])).tolist() == [
                [rank] for rank in ranks]
        else:
            assert f"rank {rank} is not in this group" in refused(
                dtlab.from_process_group, backwards)

        assert "one of 4 of a process group" in refused(dtlab.run, lambda comm: 0, ranks=3)
        for more in ({}, {"ranks": 4}):
            result = dtlab.run(lambda comm: (comm.rank, comm.size), **more)  # type: ignore[arg-type]
            assert result.values == [(r, 4) for r in range(4)]

        # Torch's messages and these never meet, whatever the order.
        work = dist.irecv(torch.zeros(1), 1) if rank == 0 else None
        if rank == 1:
            comm.send("mine", 0)
            dist.send(torch.ones(1), 0)
        if work is not None:
            assert comm.recv_object(1) == "mine"
            work.wait()

    with pytest.raises(dtlab.ConfigError, match="init_process_group"):
        dtlab.from_process_group()
    in_group(4, script)


def test_a_group_is_joined_at_a_second_try_and_leaves_no_file_when_destroyed() -> None:
    def script(rank: int, _store: dist.Store) -> None:
        dtlab.from_process_group()
        again = dist.new_group([0, 1])
        if rank == 0:
            with pytest.MonkeyPatch.context() as monkeypatch:
                monkeypatch.setattr(joined, "_MEET_S", 0.1)
                said = refused(dtlab.from_process_group, again)
            assert "from_process_group waited 0.1 s for rank 1" in said
        dist.barrier()
        assert dtlab.from_process_group(again).size == 2
        files = []
        for _ in range(4):
            group = dist.new_group([0, 1])
            comm = dtlab.from_process_group(group)
            assert collectives.all_reduce(comm, torch.ones(1)).item() == 2
            dist.barrier()
            dist.destroy_process_group(group)
            del group
            dtlab.from_process_group()
            files.append(len(os.listdir("/dev/fd")))
            assert "is closed" in refused(collectives.barrier, comm)
        assert len(set(files)) == 1, files

    in_group(2, script)


def test_a_group_of_gloo_works_on_the_cpu_also_beside_a_gpu() -> None:
    def script(rank: int, _store: dist.Store) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            comm = dtlab.from_process_group()
            assert (comm.device, type(comm).__name__) == (torch.device("cpu"), "ProcessComm")
            assert dtlab.from_process_group(device="cpu") is comm
            assert collectives.all_reduce(comm, torch.ones(3)).tolist() == [2.0] * 3
        if not torch.cuda.device_count():
            assert "no GPU" in refused(dtlab.from_process_group, None, "cuda")
        assert "device='tpu': choose" in refused(dtlab.from_process_group, device="tpu")

    in_group(2, script)


def test_what_cannot_end_is_named_on_every_rank_and_torchs_group_stays_whole() -> None:
    def cross(comm: Comm) -> None:
        comm.recv(torch.ones(3), 1 - comm.rank)

    def misfit(comm: Comm) -> None:
        if comm.rank:
            comm.recv(torch.ones(4), 0)
        else:
            comm.send(torch.ones(3), 1)

    def slow(comm: Comm) -> None:
        if comm.rank == 0:
            time.sleep(2)
        comm.sendrecv(1, 1 - comm.rank, [], 1 - comm.rank)

    def busy(comm: Comm) -> None:
        for _ in range(300):  # no wait is long
            time.sleep(0.01)
            comm.sendrecv(1, 1 - comm.rank, [], 1 - comm.rank)

    def fails(comm: Comm) -> None:
        if comm.rank == 1:
            raise ValueError("on rank 1 only")
        comm.recv_object(1)

    def script(rank: int, _store: dist.Store) -> None:
        said = refused(dtlab.run, cross)
        assert said.startswith("Deadlock"), said
        assert "1  recv   0        12  test_joined.py:" in said, said
        assert "ShapeMismatch" in refused(dtlab.run, misfit)
        said = refused(dtlab.run, slow, timeout=0.5)
        assert said.startswith("RunTimeout"), said
        assert "0  running" in said, said
        if rank == 0:  # who comes when another has given up hears so
            time.sleep(1)
        assert "dtlab.run waited 0.1 s for rank 0" in refused(dtlab.run, slow, timeout=0.1)
        assert dtlab.run(lambda comm: comm.rank).values == [0, 1]
        assert refused(dtlab.run, busy, timeout=0.5).startswith("RunTimeout")
        assert "rank 1 raised ValueError" in refused(dtlab.run, fails)

        assert refused(cross, dtlab.from_process_group()).startswith("Deadlock")
        comm = dtlab.from_process_group()
        assert collectives.all_reduce(comm, torch.ones(1)).item() == 2
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == 2
        if rank == 0:
            said = refused(dtlab.run, cross, timeout=0.5)
            assert "dtlab.run waited 0.5 s for rank 1" in said, said

    in_group(2, script)


def test_a_monitor_whose_rank_has_read_the_verdict_ends_quietly(
        monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    for _ in range(30):
        store = dist.HashStore()
        watch = monitor.Monitor(monitor.open_status(store, 0, 1)[0], store, 0, Threads(), None)
        watch.verdict.set(0, ValueError("the reason"))
        assert "the reason" in str(watch.why())
        watch.close()
        watch._watching.join()
    assert raised == []


# ---- ten lines between a course's interface and ours ---------------------------------------------


class HandWrittenDDP(torch.nn.Module):
    """Parameters are rank 0's; gradients are averaged as backward makes them."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module, self.comm, self.works = module, dtlab.from_process_group(), list[Any]()
        for p in module.parameters():
            collectives.broadcast(self.comm, p.data)
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p: self.works.append(self.comm.begin(
                    collectives.all_reduce, p.grad, op=dist.ReduceOp.AVG)))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.module(*inputs)

    def finish_gradient_synchronization(self) -> None:
        while self.works:
            self.works.pop(0).wait()


class ShardedOptimizer(torch.optim.Optimizer):
    """Each parameter is updated by one rank, which alone has its optimizer's state."""

    def __init__(self, params: Any, kind: type[torch.optim.Optimizer], **options: Any):
        self.comm, self.kind, self.options = dtlab.from_process_group(), kind, options
        self.seen, self.inner = list[torch.Tensor](), None
        super().__init__(params, options)

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        self.seen += self.param_groups[-1]["params"]
        mine = self.seen[self.comm.rank :: self.comm.size]
        self.inner = self.kind(mine, **self.options)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.inner is not None
        self.inner.step()
        for number, p in enumerate(self.seen):
            collectives.broadcast(self.comm, p.data, root=number % self.comm.size)


class Tied(torch.nn.Module):
    """A layer used twice, one that is frozen, one without bias."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.tied, self.last = (
            torch.nn.Linear(4, 6), torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 2))
        self.frozen = torch.nn.Parameter(torch.ones(6), requires_grad=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(torch.relu(self.tied(self.first(x))) * self.frozen)
        return self.last(x)  # type: ignore[no-any-return]


def trained(module: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0,
            ranks: int = 1) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    for _ in range(5):
        x = torch.randn(12, 4, generator=numbers, dtype=torch.float64)
        y = torch.randn(12, 2, generator=numbers, dtype=torch.float64)
        part = slice(12 * rank // ranks, 12 * (rank + 1) // ranks)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(x[part]), y[part]).backward()
        if isinstance(module, HandWrittenDDP):
            module.finish_gradient_synchronization()
        optimizer.step()
    return getattr(module, "module", module).state_dict()


def test_a_courses_own_ddp_and_sharded_optimizer_run_on_our_functions() -> None:
    options = {"lr": 0.1, "weight_decay": 0.1}

    def script(rank: int, _store: dist.Store) -> Any:
        model = HandWrittenDDP(Tied(seed=rank))
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, **options)
        state = trained(model, optimizer, rank, 3)
        assert optimizer.inner is not None
        return state, sum(map(len, optimizer.inner.state.values()))

    single = Tied(seed=0)
    alone = torch.optim.AdamW(single.parameters(), **options)
    expected = trained(single, alone)
    results = in_group(3, script)
    for state, _ in results:
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)
    assert sum(count for _, count in results) == sum(map(len, alone.state.values()))


def test_a_group_with_a_limit_of_its_own_and_ctrl_c_end_a_wait() -> None:
    def script(rank: int, store: dist.Store) -> str:
        comm = dtlab.from_process_group(dist.new_group(timeout=timedelta(seconds=1)))
        if rank == 0:
            said = refused(comm.recv_object, 1)
            store.set("late", "")
        else:  # it comes too late, which is no death
            store.wait(["late"])
            said = refused(comm.recv_object, 0)
        assert said.startswith("RunTimeout"), said
        assert "rank 0 waited 1 s for rank 1, the time limit of the process group" in said, said
        assert refused(dtlab.from_process_group().recv_object, 1 - rank).startswith("Deadlock")

        def wait(comm: Comm) -> None:
            if comm.rank == 0:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
                comm.recv_object(1)
            while not store.check(["interrupted"]):  # it computes
                time.sleep(0.01)
            comm.recv_object(0)

        try:
            return refused(dtlab.run, wait, timeout=None)
        except KeyboardInterrupt:
            store.set("interrupted", "")
            return "interrupted"

    first, second = in_group(2, script)
    assert first == "interrupted"
    assert "rank 0 raised KeyboardInterrupt" in second


def test_hosts_tell_each_other_of_a_deadlock_through_the_store() -> None:
    def cycle(comm: Comm) -> None:
        for _ in range(3):
            collectives.all_reduce(comm, torch.ones(3))
        if comm.rank != 1:
            comm.recv(torch.ones(2), (comm.rank + 1) % 3)

    def script(rank: int, _store: dist.Store) -> None:
        monitor.host_name = hosts.host_name = lambda: f"host {rank % 2}"
        said = refused(dtlab.run, cycle)
        assert said.startswith("Deadlock"), said
        assert "1  returned" in said, said
        assert "2  recv      0         8  test_joined.py:" in said, said

    in_group(3, script)


VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


def test_variables_of_a_tutorial_start_no_group(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    env |= {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent("""
        import torch.distributed as dist
        import dtlab
        from dtlab.cli.doctor import launch_variables, two_ranks

        print(dtlab.run(lambda comm: comm.size, ranks=3).values, two_ranks().state)
        print(launch_variables())
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert dtlab.run(lambda comm: comm.size).values == [1]
        def hello(comm):
            return comm.rank, comm.size, (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        print(dtlab.check("hello-ranks", hello, show=False).points)
        """))
    done = subprocess.run([sys.executable, path], env=env, text=True, capture_output=True,
                          timeout=100)
    ranks, found, graded = done.stdout.splitlines()
    assert ranks == "[3, 3, 3] ok", done.stderr
    assert graded == "4"
    assert "RANK=0, WORLD_SIZE=2" in found
    assert "unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT" in found


def test_who_was_started_by_torchrun_or_slurm() -> None:
    place = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}
    assert started(place) is None
    assert started(place | {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1"}) == (3, 4, 1)
    assert started(place | slurm) == started(slurm | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}) == (
        1, 2, 1)
    assert started(slurm) is None
    assert started(place | slurm | {"SLURM_NTASKS": "1"}) is None
    # torchrun under Slurm: torchrun has the last word
    assert started(place | slurm | {"TORCHELASTIC_RUN_ID": "x"}) == (3, 4, 3)


def test_a_rank_that_there_can_not_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(dtlab.ConfigError, match="rank 2 of 2; ranks count from 0"):
        dtlab.run(lambda comm: comm.rank)


def test_srun_alone_is_joined(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    path = tmp_path / "script.py"
    path.write_text("import dtlab\nprint(dtlab.run(lambda comm: comm.rank).values)")
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SLURM_NTASKS": "2"}
    processes = [subprocess.Popen([sys.executable, path], env=env | {"SLURM_PROCID": str(rank)},
                                  text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                 for rank in range(2)]
    try:
        assert [process.communicate(timeout=100)[0] for process in processes] == ["[0, 1]\n"] * 2
        assert [process.returncode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
