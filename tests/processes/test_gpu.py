"""GPUs: what can be proven without one, and what needs one (`-m cuda`)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtlab import Comm, ConfigError, RankFailed, Recv, Send, ShapeMismatch, run
from dtlab.collectives import all_reduce
from dtlab.parallel import full_state_dict, load, save, zero
from dtlab.processes.nccl_communicator import NcclComm

GPUS = torch.cuda.device_count()


def as_nccl(comm: Any, monkeypatch: pytest.MonkeyPatch) -> NcclComm:
    """The communicator of GPUs on CPU tensors: torch's batches run over Gloo as well."""
    monkeypatch.setattr(torch.cuda, "current_stream",
                        lambda: SimpleNamespace(synchronize=lambda: None))
    new_group = dist.new_group
    monkeypatch.setattr(dist, "new_group",
                        lambda ranks, backend, **how: new_group(ranks, backend="gloo", **how))
    return NcclComm(comm.end, comm.members, (*comm.context, "nccl"))


def test_batches_move_tensors_and_everything_else_goes_over_gloo() -> None:
    def lesson(plain: Comm) -> list[Any]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            comm = as_nccl(plain, monkeypatch)
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

    result = run(lesson, ranks=4)
    assert result.values == [
        [float((r - 1) % 4), (r - 1) % 4, 40.0, [2.0, 2.0]] for r in range(4)]
    assert result.trace.sent_bytes(0) > 48


def test_batches_refuse_what_does_not_fit_and_receives_from_anyone() -> None:
    def mismatch(plain: Comm) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            comm = as_nccl(plain, monkeypatch)
            if comm.rank == 0:
                comm.send(torch.zeros(3), 1)
            else:
                comm.recv(torch.zeros(4), 0)

    def anyone(plain: Comm) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            as_nccl(plain, monkeypatch).recv(torch.zeros(1))

    with pytest.raises(ShapeMismatch):
        run(mismatch, ranks=2, timeout=20)
    with pytest.raises(ConfigError, match="NCCL can't receive from anyone"):
        run(anyone, ranks=2, timeout=20)


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
@pytest.mark.skipif(GPUS < 2, reason="NCCL takes a GPU for each rank")
def test_nccl_carries_tensors_between_gpus() -> None:
    def lesson(comm: Comm) -> tuple[float, float, Any]:
        x = torch.full((1000,), comm.rank + 1.0, device=comm.device)
        mean = all_reduce(comm, x).mean().item()
        half = comm.split(comm.rank % 2)
        assert half is not None
        y = all_reduce(half, torch.ones(3, device=comm.device)).sum().item()
        peer = 1 - comm.rank if comm.rank < 2 else comm.rank
        things: list[Any] = []
        if comm.rank < 2:
            comm.exchange(Send({"from": comm.rank}, peer), Recv(things, peer))
        return mean, y, things

    assert run(lesson, ranks=2, backend="nccl", device="cuda").values == [
        (3.0, 3.0, [{"from": 1}]), (3.0, 3.0, [{"from": 0}])]


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
