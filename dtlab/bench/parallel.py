"""A training step of a small GPT, by each kind of parallelism, beside torch's own."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy

from dtlab.bench.calls import spread, take_turns
from dtlab.checks import check_whole, short
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.models import GPT, GPTConfig, text_batch
from dtlab.parallel import DataParallel, MemoryMeter, pipeline, tensor, zero
from dtlab.processes import run

CONFIG = GPTConfig(layers=6, hidden=368, heads=8, context=64)  # 9,897,728 parameters
SAMPLES = 2  # of each rank, or micro-batch
MICRO_BATCHES = 8
WARM_UP = 2  # steps
ADAMW = torch.optim.AdamW

Trained = tuple[Any, torch.optim.Optimizer]
# Each contestant imports of torch what it needs: all of it takes as long as torch itself.


class StepTime(NamedTuple):
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


def measure_parallel(ranks: int, repeats: int = 7, config: GPTConfig = CONFIG) -> list[StepTime]:
    """Time each contestant's step in turn, again and again, on the same `ranks` processes."""
    check_whole("repeats", repeats)
    if not isinstance(config, GPTConfig):
        raise ConfigError(f"config must be a GPTConfig, not {short(config)}")
    values = run(_take_turns, repeats, config, ranks=ranks, timeout=1200, trace=False,
                 echo=False).values
    rows = []
    for name, (_, peer, *_) in CONTESTANTS.items():
        took, theirs = ([max(times) for times in zip(*(v[0][who] for v in values), strict=True)]
                        for who in (name, peer))
        peak, their_peak = (max(v[1][who] for v in values) for who in (name, peer))
        ratio = statistics.median(took) / statistics.median(theirs)
        rows.append(StepTime(name, ranks, values[0][2], *spread(took), peak, peer, ratio,
                             peak / their_peak))
    return rows


def _take_turns(comm: Comm, repeats: int, config: GPTConfig
                ) -> tuple[dict[str, list[float]], dict[str, int], int]:
    """(seconds a step, peak in bytes, parameters); the first two by contestant."""
    parameters = sum(p.numel() for p in GPT(config, device="meta").parameters())
    contestants = {name: make(GPT(config), comm) for name, (make, *_) in CONTESTANTS.items()}
    steps = {name: _steps(comm, name, trained, config) for name, trained in contestants.items()}
    times = take_turns(comm, steps, repeats, before=WARM_UP)
    peaks: dict[str, int] = {}
    for name, trained in contestants.items():
        with MemoryMeter(*trained) as meter:
            steps[name]()
        peaks[name] = meter.peak
    return times, peaks, parameters


def _steps(comm: Comm, name: str, trained: Trained, config: GPTConfig) -> Callable[[], None]:
    """A function that takes the next step: data-parallel ranks have samples of their own, the
    others the same."""
    model, optimizer = trained
    _, _, loss_of, own, samples = CONTESTANTS[name]
    batches = count()

    def step() -> None:
        batch = next(batches)
        tokens, targets = text_batch(batch * comm.size + comm.rank if own else batch, samples,
                                     config.context)
        loss_of(comm, model, tokens, targets)
        optimizer.step()
        optimizer.zero_grad()

    return step


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
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (comm.size,))
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(gpt, mesh=mesh)
    return gpt, ADAMW(gpt.parameters())


def _loss(comm: Comm, model: nn.Module, tokens: Tensor, targets: Tensor) -> None:
    _mean_loss(model(tokens), targets).backward()


def _tensor_parallel(sequence: bool) -> Callable[[GPT, Comm], Trained]:
    def make(gpt: GPT, comm: Comm) -> Trained:
        sharded = tensor.shard(gpt, comm, sequence)
        return sharded, ADAMW(sharded.parameters())

    return make


def _vocab_loss(comm: Comm, model: nn.Module, tokens: Tensor, targets: Tensor) -> None:
    tensor.vocab_cross_entropy(comm, model(tokens), targets).backward()


def _dtensor(gpt: GPT, comm: Comm) -> Trained:
    sharded = torch_tensor_parallel(gpt, init_device_mesh("cpu", (comm.size,)))
    return sharded, ADAMW(sharded.parameters(), foreach=False)


def _dtensor_loss(comm: Comm, model: nn.Module, tokens: Tensor, targets: Tensor) -> None:
    from torch.distributed.tensor.parallel import loss_parallel

    with loss_parallel():
        _loss(comm, model, tokens, targets)


def torch_tensor_parallel(gpt: GPT, mesh: DeviceMesh) -> GPT:
    """In place: cut `gpt` by torch's `parallelize_module` as `tensor.shard` cuts it, with its
    queries, keys and values put in order of ranks, and logits that stay cut. Returns it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel as colwise  # noqa: N813
    from torch.distributed.tensor.parallel import PrepareModuleOutput, parallelize_module
    from torch.distributed.tensor.parallel import RowwiseParallel as rowwise  # noqa: N813

    ranks = mesh.size()
    plan: dict[str, Any] = {
        "tokens": rowwise(input_layouts=Replicate()),
        "head": colwise(output_layouts=Shard(-1), use_local_output=False),
        "norm": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate(),
                                    use_local_output=gpt.head is not None)}
    if gpt.head is None:
        del plan["head"]
    block: Any
    for number, block in enumerate(gpt.blocks):
        attention = block.attention
        with torch.no_grad():
            for p in attention.qkv.parameters():
                parts = [part.chunk(ranks) for part in p.chunk(3)]
                p.copy_(torch.cat([part[r] for r in range(ranks) for part in parts]))
        attention.heads //= ranks
        attention.kv_heads //= ranks
        plan |= {f"blocks.{number}.attention.qkv": colwise(),
                 f"blocks.{number}.attention.out": rowwise(),
                 f"blocks.{number}.mlp_up": colwise(), f"blocks.{number}.mlp_down": rowwise()}
    parallelize_module(gpt, mesh, plan)
    return gpt


class _Cut(nn.ModuleList):
    """Stages of this rank, and the function that runs a step of them."""

    step: Callable[[Tensor, Tensor], Any]


def _pipeline(chunks: int) -> Callable[[GPT, Comm], Trained]:
    def make(gpt: GPT, comm: Comm) -> Trained:
        schedule = pipeline.interleaved(comm.size, MICRO_BATCHES, chunks)
        stages = _stages(gpt, comm, chunks)
        run_step = pipeline.Pipeline(list(stages), schedule, comm).step
        stages.step = lambda tokens, targets: run_step(tokens, targets, _mean_loss)
        return stages, ADAMW(stages.parameters())

    return make


def _torch_pipeline(chunks: int) -> Callable[[GPT, Comm], Trained]:
    def make(gpt: GPT, comm: Comm) -> Trained:
        from torch.distributed.pipelining import (
            PipelineStage,
            Schedule1F1B,
            ScheduleInterleaved1F1B,
        )

        stages = _stages(gpt, comm, chunks)
        theirs = [PipelineStage(stage, comm.rank + chunk * comm.size, chunks * comm.size,
                                torch.device("cpu")) for chunk, stage in enumerate(stages)]
        schedule: Any = (Schedule1F1B(theirs[0], MICRO_BATCHES, _mean_loss) if chunks == 1
                         else ScheduleInterleaved1F1B(theirs, MICRO_BATCHES, _mean_loss))  # type: ignore[arg-type]
        last = comm.rank == comm.size - 1
        stages.step = lambda tokens, targets: schedule.step(
            *([] if comm.rank else [tokens]), **({"target": targets} if last else {}))
        return stages, ADAMW(stages.parameters())

    return make


def _stages(gpt: GPT, comm: Comm, chunks: int) -> _Cut:
    stages = pipeline.cut(pipeline.gpt_layers(gpt), chunks * comm.size)
    return _Cut(stages[comm.rank :: comm.size])


def _mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def _pipeline_step(comm: Comm, model: _Cut, tokens: Tensor, targets: Tensor) -> None:
    model.step(tokens, targets)


DDP, ZERO_REDUNDANCY = "torch DDP", "torch ZeroRedundancyOptimizer"
FSDP = "torch FSDP2 fully_shard"
DTENSOR = "torch DTensor parallelize_module"
TORCH_1F1B, TORCH_INTERLEAVED = "torch Schedule1F1B", "torch ScheduleInterleaved1F1B"


class TrainingContestant(NamedTuple):
    """make: from a whole model; loss_of: runs forward and backward; own: each rank has samples of
    its own; samples: their number."""

    make: Callable[[GPT, Comm], Trained]
    peer: str
    loss_of: Callable[[Comm, Any, Tensor, Tensor], None] = _loss
    own: bool = True
    samples: int = SAMPLES


CONTESTANTS: dict[str, TrainingContestant] = {
    DDP: TrainingContestant(_ddp, DDP),
    **{f"DataParallel {strategy}": TrainingContestant(_data_parallel(strategy), DDP)
       for strategy in ("parameter", "flat", "bucket", "overlap")},
    ZERO_REDUNDANCY: TrainingContestant(_zero_redundancy, ZERO_REDUNDANCY),
    "zero stage 1": TrainingContestant(_zero(1), ZERO_REDUNDANCY),
    "zero stage 2": TrainingContestant(_zero(2), ZERO_REDUNDANCY),
    FSDP: TrainingContestant(_fsdp, FSDP),
    "zero stage 3": TrainingContestant(_zero(3), FSDP),
    DTENSOR: TrainingContestant(_dtensor, DTENSOR, _dtensor_loss, False),
    "tensor parallel": TrainingContestant(_tensor_parallel(False), DTENSOR, _vocab_loss, False),
    "tensor and sequence parallel": TrainingContestant(_tensor_parallel(True), DTENSOR, _vocab_loss,
                                               False),
    **{name: TrainingContestant(make, peer, _pipeline_step, False, MICRO_BATCHES * SAMPLES)
       for peer, chunks in ((TORCH_1F1B, 1), (TORCH_INTERLEAVED, 2))
       for name, make in ((peer, _torch_pipeline(chunks)),
                          (peer.replace("torch Schedule", "pipeline "), _pipeline(chunks)))},
}
