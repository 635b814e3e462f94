"""GPUs: what can be proven without one, and what needs one (`-m cuda`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtlab import Comm, ConfigError, Deadlock, RankFailed, Recv, Send, ShapeMismatch, run
from dtlab.collectives import all_reduce
from dtlab.parallel import full_state_dict, load, save, zero
from dtlab.processes.nccl_communicator import NcclComm
from dtlab.processes.nccl_transport import Direction, PollingStore


def as_nccl(comm: Any, monkeypatch: pytest.MonkeyPatch) -> NcclComm:
    """The communicator of GPUs on CPU tensors: its directions go over Gloo as well."""
    event = SimpleNamespace(synchronize=lambda: None)
    stream = SimpleNamespace(record_event=lambda: event, wait_event=lambda event: None,
                             wait_stream=lambda other: None, synchronize=lambda: None)
    for name, stub in (("current_stream", stream), ("Stream", stream), ("set_device", None),
                       ("stream", nullcontext())):
        monkeypatch.setattr(torch.cuda, name, lambda *_, stub=stub: stub)

    class Group:
        def __init__(self, direction: Direction):
            self.start, self.how = comm.endpoint.transport.start, direction

        def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
            return self.start([(peer == 1, tensors[0], self.how.peer, self.how.tag ^ 1)])[0]

        recv = send

        def abort(self) -> None:
            pass

    monkeypatch.setattr(Direction, "new_group", lambda direction: Group(direction))
    return NcclComm(comm.endpoint, comm.members, (*comm.context, "nccl"))


def over_nccl(plain: Comm, fn: Callable[[Comm], Any]) -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return fn(as_nccl(plain, monkeypatch))


def test_tensors_go_their_way_and_everything_else_over_gloo() -> None:
    def lesson(comm: Comm) -> list[Any]:
        p, me = comm.size, comm.rank
        right, left = (me + 1) % p, (me - 1) % p
        x, things, nothing = torch.zeros(3, 4).t(), [], torch.empty(0)
        comm.exchange(Send(torch.full((4, 3), float(me)), right), Recv(x, left),
                      Send({"me": me}, right), Recv(things, left),
                      Send(nothing, right), Recv(nothing.clone(), left))
        total = all_reduce(comm, torch.ones(10)).sum().item()
        half = comm.split(me % 2)
        assert half is not None
        assert isinstance(half, NcclComm)
        pair = all_reduce(half, torch.ones(2)).tolist()
        return [x.mean().item(), things[0]["me"], total, pair]

    result = run(over_nccl, lesson, ranks=4)
    assert result.values == [
        [float((r - 1) % 4), (r - 1) % 4, 40.0, [2.0, 2.0]] for r in range(4)]
    assert result.trace.sent_bytes(0) > 48


def answers(comm: Comm) -> Any:
    """Two of three ranks post a receive, and send beside it and on a stream."""
    if comm.rank == 2:
        return None
    x, y, peer = *torch.zeros(2, 3, device=comm.device), 1 - comm.rank
    work, = comm.post(Recv(x, peer))
    begun = comm.begin(lambda comm: comm.recv(y, peer) if comm.rank else comm.send(y, peer))
    comm.send(torch.full((3,), comm.rank + 1.0, device=comm.device), peer)
    work.wait()
    begun.wait()
    return x.tolist()


def both_receive(comm: Comm) -> None:
    comm.recv(torch.zeros(1, device=comm.device), 1 - comm.rank)


def test_a_message_waits_for_no_other_over_nccl() -> None:
    """Not for ranks that have no part in it, and not for those of another direction or group."""
    assert run(over_nccl, answers, ranks=3, timeout=20).values == [[2.0] * 3, [1.0] * 3, None]
    with pytest.raises(Deadlock, match="every rank waits"):
        run(over_nccl, both_receive, ranks=2, timeout=20)


def test_a_wait_for_a_key_lets_other_threads_use_the_store() -> None:
    inner = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                          timeout=timedelta(seconds=5))  # takes one question at a time
    stores = [PollingStore("a", inner), PollingStore("b", inner)]
    waiting, other = (dist.PrefixStore("", store) for store in stores)  # asked from C++
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(waiting.get, "key")
        time.sleep(0.1)
        other.set("key", b"\0\xff not this one")
        assert other.get("key") == b"\0\xff not this one"
        assert not waits.done()
        waiting.set("key", b"this one")
        assert waits.result(5) == b"this one"


def test_gpus_refuse_what_does_not_fit_and_receives_from_anyone() -> None:
    def mismatch(comm: Comm) -> None:
        if comm.rank == 0:
            comm.send(torch.zeros(3), 1)
        else:
            comm.recv(torch.zeros(4), 0)

    with pytest.raises(ShapeMismatch):
        run(over_nccl, mismatch, ranks=2, timeout=20)
    with pytest.raises(ConfigError, match="NCCL can't receive from anyone"):
        run(over_nccl, lambda comm: comm.recv(torch.zeros(1)), ranks=2, timeout=20)


@pytest.mark.cuda
def test_runs_work_after_the_parent_has_used_cuda() -> None:
    assert torch.ones(3, device="cuda").sum().item() == 3
    assert run(lambda comm: torch.ones(2, device="cuda").sum().item(), ranks=2).values == [2.0] * 2


@pytest.mark.cuda
def test_gloo_carries_tensors_between_ranks_that_share_a_gpu() -> None:
    def lesson(comm: Comm) -> float:
        x = torch.full((1000,), comm.rank + 1.0, device=comm.device)
        return all_reduce(comm, x).mean().item()

    assert run(lesson, ranks=4, device="cuda").values == [10.0] * 4
    with pytest.raises(RankFailed, match="on cpu"):
        run(lambda comm: comm.send(torch.zeros(1), 1 - comm.rank), ranks=2, device="cuda")


@pytest.mark.cuda
def test_training_on_a_gpu_is_resumed_with_the_same_bits(tmp_path: Path) -> None:
    def train(comm: Comm, first: int, last: int, folder: Path | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(comm.rank)
        module = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.3), nn.Linear(256, 10))
        model, optimizer = zero(module.to(comm.device), comm, 2, torch.optim.Adam, lr=1e-3)
        if first:
            load(tmp_path / "c", model, optimizer)
        for step in range(first, last):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x.to(comm.device)).square().mean().backward()
            optimizer.step()
        if folder:
            save(folder, model, optimizer)
        return {name: x.cpu() for name, x in full_state_dict(model).items()}

    whole = run(train, 0, 6, None, ranks=3, device="cuda").values[0]
    run(train, 0, 3, tmp_path / "c", ranks=3, device="cuda")
    resumed = run(train, 3, 6, None, ranks=3, device="cuda").values[0]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
