"""Ranks that share a GPU train as one CPU does in float64 (`-m cuda`)."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtlab
from dtlab.collectives import (
    ALGORITHMS,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    reduce_scatter,
)
from dtlab.parallel import DataParallel, full_state_dict, load, save, zero
from dtlab.parallel.data import STRATEGIES
from dtlab.parallel.pipeline import interleaved, one_f_one_b, zb_v
from tests.collectives.test_every_algorithm import assert_right, call, inputs
from tests.parallel import test_hybrid
from tests.parallel.test_equal_to_one_device import Wrap
from tests.parallel.training import MODELS, OPTIMIZERS, difference, one_device, train
from tests.processes.test_gpu import answers, both_receive

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]
TOLERANCE = 1e-9  # other orders of additions, for ten steps
BACKENDS = "gloo", "nccl"


def on_gpus(backend: str, fn: Callable[..., Any], *args: Any, ranks: int) -> dtlab.Result:
    """`dtlab.run` on GPUs, which ranks share if there are too few: NCCL allows that to ranks of
    different hosts, so they say that they are."""
    def lesson(comm: dtlab.Comm, *args: Any) -> Any:
        if ranks > torch.cuda.device_count():
            os.environ.update(NCCL_HOSTID=f"host of rank {comm.rank}", NCCL_SOCKET_IFNAME="lo")
        return fn(comm, *args)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(import_module("dtlab.processes.run"), "check_backend",
                            lambda *_: None)
        return dtlab.run(lesson, *args, ranks=ranks, backend=backend, device="cuda")


@pytest.mark.parametrize("how", [*STRATEGIES, 1, 2, 3])
@pytest.mark.parametrize(("model", "backend"), [*((m, "gloo") for m in MODELS), ("gpt", "nccl")])
def test_data_parallelism_and_zero(model: str, how: str | int, backend: str) -> None:
    for optimizer in OPTIMIZERS if backend == "gloo" else ("adam",):
        expected = one_device(model, optimizer)
        for state in on_gpus(backend, train, model, optimizer, Wrap(how), ranks=3).values:
            assert difference(state, expected) < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("axes", "options"), [
    ({"tp": 2}, {}),
    ({"tp": 4}, {"sequence": True, "micro_batches": 2}),
    ({"pp": 2}, {"schedule": one_f_one_b, "micro_batches": 4}),
    ({"pp": 2}, {"schedule": interleaved, "micro_batches": 4}),
    ({"pp": 2, "tp": 2}, {"schedule": zb_v, "micro_batches": 2, "recompute": True}),
    ({"pp": 2, "dp": 2, "tp": 2}, {"micro_batches": 2, "stage": 1, "sequence": "regather"}),
    ({"dp": 2, "tp": 2}, {"stage": 3, "micro_batches": 2}),
])
def test_hybrids(axes: dict[str, int], options: dict[str, Any], backend: str) -> None:
    values = on_gpus(backend, test_hybrid.train, axes, test_hybrid.CONFIG, "adam", 8, options,
                     ranks=math.prod(axes.values())).values
    test_hybrid.assert_equal(values, test_hybrid.one_device(test_hybrid.CONFIG, "adam", 8))


def test_a_checkpoint_of_a_gpu_goes_on_without_one(tmp_path: Path) -> None:
    def lesson(comm: dtlab.Comm, steps: range, read: bool) -> dict[str, torch.Tensor]:
        module = nn.Sequential(nn.Linear(12, 24, dtype=torch.float64), nn.Tanh(),
                               nn.Linear(24, 5, dtype=torch.float64)).to(comm.device)
        model, optimizer = zero(module, comm, 2, torch.optim.AdamW, lr=1e-2)
        if read:
            load(tmp_path / "c", model, optimizer)
        for step in steps:
            x = torch.randn(6, 12, dtype=torch.float64,
                            generator=torch.Generator().manual_seed(step)).to(comm.device)
            optimizer.zero_grad()
            model.backward(model(x.tensor_split(comm.size)[comm.rank]).square().mean(),
                           len(x.tensor_split(comm.size)[comm.rank]))
            optimizer.step()
        if not read:
            save(tmp_path / "c", model, optimizer)
        return full_state_dict(model)

    def whole(comm: dtlab.Comm) -> dict[str, torch.Tensor]:
        return lesson(comm, range(6), read=False)

    torch.manual_seed(0)
    expected = dtlab.run(whole, ranks=1).values[0]
    torch.manual_seed(0)
    dtlab.run(lesson, range(3), False, ranks=2, device="cuda")
    for state in dtlab.run(lesson, range(3, 6), True, ranks=3).values:
        assert difference(state, expected) < TOLERANCE


def test_half_precision_with_a_gradient_scaler_is_torchs_own_or_refused() -> None:
    def lesson(comm: dtlab.Comm) -> Any:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).to(comm.device)
        alone = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).to(comm.device)
        alone.load_state_dict(module.state_dict())
        model = DataParallel(module, comm)
        x = torch.randn(8, 32, device=comm.device)
        for net in (model, alone):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cuda")
            for _ in range(5):
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = net(x).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return max(float((a - b).abs().max())
                   for a, b in zip(module.parameters(), alone.parameters(), strict=True))

    assert dtlab.run(lesson, ranks=2, device="cuda").values == pytest.approx([0, 0], abs=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_collectives_of_several_dtypes_stay_on_the_gpu(backend: str) -> None:
    def lesson(comm: dtlab.Comm) -> list[Any]:
        p, me = comm.size, comm.rank
        found = []
        for dtype in (torch.float16, torch.bfloat16, torch.int16, torch.int64, torch.complex64):
            x = torch.arange(12, device=comm.device).to(dtype) + me
            total = all_reduce(comm, x.clone())
            rows = all_gather(comm, x)
            parts = reduce_scatter(comm, x.reshape(p, -1).clone())
            moved = all_to_all(comm, x.reshape(p, -1).clone())
            assert {t.device for t in (total, rows, parts, moved)} == {comm.device}
            found.append([t.cpu().to(torch.complex128).real.tolist()
                          for t in (total, rows, parts, moved)])
        return found

    assert on_gpus(backend, lesson, ranks=3).values == dtlab.run(lesson, ranks=3).values


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_every_algorithm_over_nccl(collective: str) -> None:
    def lesson(comm: dtlab.Comm) -> list[Any]:
        parts = inputs(comm.size, 5).to(comm.device)
        values = [call(comm, collective, name, parts, 1) for name in ALGORITHMS[collective]]
        return [value if value is None else value.cpu() for value in values]

    for values in zip(*on_gpus("nccl", lesson, ranks=3).values, strict=True):
        assert_right(collective, list(values), inputs(3, 5), 1)


def test_a_message_waits_for_no_other_over_nccl() -> None:
    def dies(comm: dtlab.Comm) -> None:
        all_reduce(comm, torch.ones(4, device=comm.device))
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce(comm, torch.ones(4, device=comm.device))

    assert on_gpus("nccl", answers, ranks=3).values == [[2.0] * 3, [1.0] * 3, None]
    with pytest.raises(dtlab.Deadlock, match="every rank waits"):
        on_gpus("nccl", both_receive, ranks=2)
    with pytest.raises(dtlab.RankDied, match="rank 1"):
        on_gpus("nccl", dies, ranks=3)


JOINS = """
import torch, torch.distributed as dist
import dtlab
from dtlab.collectives import all_gather, all_reduce

dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
comm = dtlab.from_process_group()
x = torch.arange(5.0, device="cuda")
total, rows = all_reduce(comm, x.clone()), all_gather(comm.split(0), x)
print(comm.device, total.device, total.tolist(), rows.tolist())

gloo = dist.new_group(backend="gloo")
comm, same = (dtlab.from_process_group(gloo, device) for device in (None, "cuda"))
print(comm.device, all_reduce(comm, torch.ones(2)).device, all_reduce(same, x.clone()).device)
"""


def test_groups_of_nccl_and_gloo_are_joined() -> None:
    done = subprocess.run([sys.executable, "-c", JOINS], capture_output=True, text=True,
                          check=False)
    assert done.stdout.split("\n")[:2] == [
        "cuda:0 cuda:0 [0.0, 1.0, 2.0, 3.0, 4.0] [[0.0, 1.0, 2.0, 3.0, 4.0]]",
        "cpu cpu cuda:0"], done.stderr


def test_a_run_of_one_rank_over_nccl() -> None:
    def lesson(comm: dtlab.Comm) -> float:
        model, optimizer = zero(nn.Linear(8, 8).to(comm.device), comm, 3, torch.optim.Adam)
        model(torch.ones(2, 8, device=comm.device)).sum().backward()
        optimizer.step()
        barrier(comm)
        return float(all_reduce(comm, torch.ones(4, device=comm.device)).sum())

    assert dtlab.run(lesson, ranks=1, backend="nccl", device="cuda").values == [4.0]
    with pytest.raises(dtlab.ConfigError, match="GPU"):
        dtlab.run(lesson, ranks=torch.cuda.device_count() + 1, backend="nccl", device="cuda")


def test_an_error_of_the_gpu_ends_the_run_in_a_sentence() -> None:
    def too_much(comm: dtlab.Comm) -> None:
        if comm.rank == 1:
            torch.empty(1 << 50, dtype=torch.uint8, device=comm.device)
        barrier(comm)

    with pytest.raises(dtlab.RankFailed, match="memory"):
        dtlab.run(too_much, ranks=2, device="cuda", timeout=60)


