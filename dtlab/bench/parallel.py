"""A training step of a small GPT, by each kind of data parallelism, beside torch's own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.models import GPT, GPTConfig, text_batch
from dtlab.parallel import DataParallel, MemoryMeter, zero
from dtlab.processes import run

CONFIG = GPTConfig(layers=6, hidden=368, heads=8, context=64)  # 9,897,728 parameters
SAMPLES = 2  # of each rank
WARM_UP = 2  # steps
ADAMW = torch.optim.AdamW

Trained = tuple[Any, torch.optim.Optimizer]


class Step(NamedTuple):
    """One contestant's training step."""

    contestant: str
    ranks: int
    parameters: int
    time_s: float  # median over the repetitions of the slowest rank
    fastest_s: float
    slowest_s: float
    repeats: int
    peak_bytes: int  # of a rank's tensors
    peer: str  # of torch
    ratio: float  # time / the peer's in the same run: below 1 is faster than torch
    peak_ratio: float  # peak / the peer's


def measure_parallel(ranks: int, repeats: int = 7, config: GPTConfig = CONFIG) -> list[Step]:
    """Each contestant's step in turn, again and again, on the same `ranks` processes."""
    if not isinstance(repeats, int) or repeats < 1:
        raise ConfigError(f"repeats must be 1 or more, not {repeats!r}")
    values = run(_take_turns, repeats, config, ranks=ranks, timeout=1200, trace=False,
                 echo=False).values
    rows = []
    for name, (_, peer) in CONTESTANTS.items():
        took, theirs = ([max(times) for times in zip(*(v[0][who] for v in values), strict=True)]
                        for who in (name, peer))
        peak, their_peak = (max(v[1][who] for v in values) for who in (name, peer))
        median_s = statistics.median(took)
        rows.append(Step(name, ranks, values[0][2], median_s, min(took), max(took), repeats, peak,
                         peer, median_s / statistics.median(theirs), peak / their_peak))
    return rows


def _take_turns(comm: Comm, repeats: int, config: GPTConfig
                ) -> tuple[dict[str, list[float]], dict[str, int], int]:
    """(seconds a step, peak in bytes, parameters); the first two by contestant."""
    parameters = sum(p.numel() for p in GPT(config, device="meta").parameters())
    contestants = {name: make(GPT(config), comm) for name, (make, _) in CONTESTANTS.items()}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(-WARM_UP, repeats):
        for name, trained in contestants.items():
            dist.barrier()
            begun = time.perf_counter()
            _step(comm, trained, config, turn)
            if turn >= 0:
                times[name].append(time.perf_counter() - begun)
    peaks: dict[str, int] = {}
    for name, trained in contestants.items():
        with MemoryMeter(*trained) as meter:
            _step(comm, trained, config, repeats)
        peaks[name] = meter.peak
    return times, peaks, parameters


def _step(comm: Comm, trained: Trained, config: GPTConfig, turn: int) -> None:
    model, optimizer = trained
    tokens, targets = text_batch((WARM_UP + turn) * comm.size + comm.rank, SAMPLES, config.context)
    loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- the contestants ---------------------------------------------------------------------------


def _data_parallel(strategy: str) -> Callable[[GPT, Comm], Trained]:
    return lambda gpt, comm: (DataParallel(gpt, comm, strategy), ADAMW(gpt.parameters()))


def _zero(stage: int) -> Callable[[GPT, Comm], Trained]:
    return lambda gpt, comm: zero(gpt, comm, stage, ADAMW)


def _ddp(gpt: GPT, comm: Comm) -> Trained:
    return nn.parallel.DistributedDataParallel(gpt), ADAMW(gpt.parameters())


def _zero_redundancy(gpt: GPT, comm: Comm) -> Trained:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a second, and warns

    return (nn.parallel.DistributedDataParallel(gpt),
            ZeroRedundancyOptimizer(gpt.parameters(), ADAMW))


def _fsdp(gpt: GPT, comm: Comm) -> Trained:
    mesh = init_device_mesh("cpu", (comm.size,))
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(gpt, mesh=mesh)
    return gpt, ADAMW(gpt.parameters())


DDP, ZERO_REDUNDANCY = "torch DDP", "torch ZeroRedundancyOptimizer"
FSDP = "torch FSDP2 fully_shard"
CONTESTANTS: dict[str, tuple[Callable[[GPT, Comm], Trained], str]] = {  # name → (make, peer)
    DDP: (_ddp, DDP),
    **{f"DataParallel {strategy}": (_data_parallel(strategy), DDP)
       for strategy in ("parameter", "flat", "bucket", "overlap")},
    ZERO_REDUNDANCY: (_zero_redundancy, ZERO_REDUNDANCY),
    "zero stage 1": (_zero(1), ZERO_REDUNDANCY),
    "zero stage 2": (_zero(2), ZERO_REDUNDANCY),
    FSDP: (_fsdp, FSDP),
    "zero stage 3": (_zero(3), FSDP),
}
