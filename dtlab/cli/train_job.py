"""The job that `dtlab train` runs on its ranks, and the check of its options."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dtlab.checks import check_choice
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.models import GPT, GPTConfig, text_batch
from dtlab.models.text import text
from dtlab.parallel import MemoryMeter, Mesh, hybrid, load, pipeline, save
from dtlab.parallel.checkpoint import read_extra
from dtlab.parallel.hybrid import AXES
from dtlab.processes import torchrun

SCHEDULES = {name: getattr(pipeline, name) for name in pipeline.__all__
             if getattr(pipeline, name).__module__.endswith(".generators")}
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16")}
MOST = 10**9  # of steps, samples, …
TELL_S = 0.3  # rank 0 says the loss no more often than this
LINE = "step {} loss {}"


@dataclass(frozen=True)
class TrainJob:
    """The work of all ranks; the options of the command by name. first: its first step."""

    axes: dict[str, int]
    config: GPTConfig
    dtype: str
    zero: int
    schedule: str
    micro_batches: int
    sequence: bool
    recompute: bool
    steps: int
    batch: int
    lr: float
    seed: int
    load: Path | None
    save: Path | None
    first: int = 0

    @property
    def model(self) -> dict[str, Any]:
        """The sizes and type that a checkpoint's model must have in common with this one's."""
        sizes = asdict(self.config)
        return {name: sizes[name] for name in ("layers", "hidden", "heads", "context")} | {
            "dtype": self.dtype}


@dataclass
class Trained:
    """A rank's results: loss and seconds of each step; peak bytes of its tensors in the last."""

    losses: list[float]
    seconds: list[float]
    peak_bytes: int


def train_rank(comm: Comm, job: TrainJob) -> Trained:
    """Run one rank's part of the job."""
    gpt = GPT(job.config, seed=job.seed, dtype=DTYPES[job.dtype]).to(comm.device)
    model, optimizer = hybrid(
        gpt, Mesh(comm, **job.axes), micro_batches=job.micro_batches,
        schedule=SCHEDULES[job.schedule], stage=job.zero, sequence=job.sequence,
        recompute=job.recompute, lr=job.lr)
    if job.load:
        load(job.load, model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = job.lr
    meter = MemoryMeter(model.module, optimizer)
    done = Trained([], [], 0)
    told_s = -TELL_S
    for step in range(job.first, job.first + job.steps):
        tokens, targets = (part.to(comm.device) for part in
                           text_batch(step, job.batch, job.config.context, job.seed))
        last = len(done.losses) == job.steps - 1
        start_s = comm.now()
        with meter if last else contextlib.nullcontext():
            loss = model.backward(tokens, targets)
            optimizer.step()
            optimizer.zero_grad()
        done.losses.append(loss.item())
        done.seconds.append(comm.now() - start_s)
        if comm.rank == 0 and (last or comm.now() - told_s > TELL_S):
            told_s = comm.now()
            print(LINE.format(len(done.losses), f"{done.losses[-1]:.3f}"), flush=True)
    if job.save:
        save(job.save, model, optimizer, extra=job.model | {"step": job.first + job.steps})
    done.peak_bytes = meter.peak
    return done


# ---- input that makes no sense -------------------------------------------------------------------


def axes_of(given: str) -> dict[str, int]:
    """The mesh "pp=2,dp=2,tp=2" as {axis: size}."""
    axes: dict[str, int] = {}
    for part in given.split(","):
        found = re.fullmatch(r"\s*(\w+)\s*=\s*([0-9]{1,6})\s*", part)
        if not found or int(found[2]) < 1 or found[1] in axes:
            raise ConfigError(f"--mesh takes different axes with their sizes, as in "
                              f"pp=2,dp=2,tp=2, not {given!r}")
        axes[found[1]] = int(found[2])
    for name in axes:
        check_choice("axis of --mesh", name, AXES)
    return axes


def mesh_text(axes: dict[str, int]) -> str:
    return " · ".join(f"{name}={size}" for name, size in axes.items())


def check(job: TrainJob) -> None:
    """Raise `ConfigError`, before any process starts, unless all parts of the job fit together."""
    pp, dp, tp = (job.axes.get(name, 1) for name in AXES)
    ranks = pp * dp * tp
    _, started, _ = torchrun.started() or (0, ranks, 0)
    if ranks != started:
        raise ConfigError(f"a mesh of {mesh_text(job.axes)} has {ranks} ranks, but torchrun has "
                          f"started {started}")
    for name, least in (("steps", 1), ("batch", 1), ("micro_batches", 1), ("seed", 0)):
        if not least <= getattr(job, name) <= MOST:
            raise ConfigError(f"--{name.replace('_', '-')} must lie between {least} and {MOST:,}, "
                              f"not {getattr(job, name)}")
    if job.config.context >= len(text()):
        raise ConfigError(f"--context {job.config.context} is longer than the text")
    if not 0 <= job.lr < math.inf:
        raise ConfigError(f"--lr must be a number of at least 0, not {job.lr}")
    check_choice("dtype", job.dtype, DTYPES)
    check_choice("schedule", job.schedule, SCHEDULES)
    if job.zero not in (0, 1, 2, 3) or (job.zero == 3 and pp > 1):
        raise ConfigError(f"--zero takes 0, 1, 2 or, on a mesh without pp, 3; not {job.zero}")
    if job.config.heads % tp:
        raise ConfigError(f"tp={tp} ranks can't share --heads {job.config.heads} evenly")
    if job.sequence and job.config.context % tp:
        raise ConfigError(f"--sequence: tp={tp} ranks can't share --context {job.config.context} "
                          f"evenly")
    if job.batch % (dp * job.micro_batches):
        raise ConfigError(f"--batch {job.batch} can't be cut for dp={dp} with --micro-batches "
                          f"{job.micro_batches} each; take a multiple of {dp * job.micro_batches}")
    stages = SCHEDULES[job.schedule](pp, job.micro_batches).check().stages
    if stages > job.config.layers + 2:
        raise ConfigError(f"--layers {job.config.layers}, with the embedding and the output, make "
                          f"no {stages} stages, as {job.schedule} on pp={pp} needs")


def first_step(job: TrainJob, folder: Path) -> int:
    """Return the checkpoint's number of steps. Raises `ConfigError` if its model is another one."""
    about = read_extra(folder)
    try:
        step, saved = int(about["step"]), {name: about[name] for name in job.model}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{folder} holds no checkpoint that dtlab train --save has written"
                          ) from None
    for name, value in job.model.items():
        if saved[name] != value:
            raise ConfigError(f"the checkpoint {folder} is of a model with --{name} {saved[name]}, "
                              f"not {value}")
    return step
