"""All kinds of parallelism at once: a GPT on a mesh of pipeline (pp), data (dp) and tensor (tp)
parallel ranks.

Each axis does its own work, and knows nothing of the others:

| axis | cuts        | by                  | its messages                                   |
|------|-------------|---------------------|------------------------------------------------|
| tp   | matrices    | `tensor.shard`      | in each layer: all-reduces of activations      |
| pp   | layers      | `pipeline.Pipeline` | between stages: activations of a micro-batch   |
| dp   | the batch   | `DataParallel`      | after backward: an all-reduce of the gradients |
|      | its copies  | or `zero`           | the same in two halves: see there              |

Source: Narayanan et al. 2021 (Megatron-LM), Rajbhandari et al. 2020 (ZeRO). Chapter: 14.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dtlab.checks import short
from dtlab.collectives import all_reduce
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.models import GPT
from dtlab.parallel.conversions import scatter_to
from dtlab.parallel.data import DataParallel
from dtlab.parallel.large_batch import Layerwise, whole_norms
from dtlab.parallel.mesh import Mesh
from dtlab.parallel.model_check import check_same_batch
from dtlab.parallel.pipeline import Action, Pipeline, Schedule, cut, gpt_layers, one_f_one_b
from dtlab.parallel.pipeline.batch import counted
from dtlab.parallel.sharded import ShardMetadata, whole_names
from dtlab.parallel.sharded_optimizer import check_elementwise, grouped
from dtlab.parallel.synchronized import DistributedModule, SteppedPart, SynchronizedModule
from dtlab.parallel.tensor import draw_shared_seeds, shard, vocab_cross_entropy
from dtlab.parallel.zero import zero

AXES = ("pp", "dp", "tp")


def hybrid(
    gpt: GPT, mesh: Mesh, *, micro_batches: int = 1,
    schedule: Schedule | Callable[[int, int], Schedule] = one_f_one_b, stage: int = 0,
    sequence: bool | str = False, recompute: bool = False,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    groups: Callable[[str], dict[str, Any]] | None = None,
    seconds: Callable[[Action], float] = lambda action: 0.0, **options: Any,
) -> tuple[Hybrid, torch.optim.Optimizer]:
    """(model, optimizer) that train `gpt`, the same on all ranks, on `mesh`, whose axes are some of
    pp, dp and tp, in any order.

    Train so: `loss = model.backward(tokens, targets, seeds); optimizer.step();
    optimizer.zero_grad()`, with `clip_grad_norm_(model, …)` before the step if you like.

    micro_batches: the number into which each dp rank cuts its samples; without a pipeline that is
        gradient accumulation. schedule: of `dtlab.parallel.pipeline`, which has micro-batches of
        its own, or a function (p, m) that makes one.
    stage: of ZeRO; 0 is none, and 3 needs a schedule of one stage. With a pipeline, stage 2 reduces
        gradients after the last micro-batch, so that meanwhile they take the memory of stage 1.
    sequence: see `tensor.shard`. recompute, seconds: see `Pipeline`. optimizer, groups: see `zero`;
        names are those of the whole GPT.
    `gpt` keeps this rank's part only. Raises `ConfigError` if mesh, model and schedule don't fit
    together.
    """
    if not isinstance(gpt, GPT) or not isinstance(mesh, Mesh):
        raise ConfigError(f"hybrid takes a GPT and a Mesh, not {short(gpt)} and {short(mesh)}")
    pp, dp, tp = (_axis(mesh, name) for name in AXES)
    if callable(schedule):
        schedule = schedule(pp.size, micro_batches)
    elif isinstance(schedule, Schedule) and micro_batches not in (1, schedule.micro_batches):
        raise ConfigError(f"hybrid: the schedule has {schedule.micro_batches} micro-batches, not "
                          f"{short(micro_batches)}; leave micro_batches out")
    if not isinstance(schedule, Schedule):
        raise ConfigError(f"hybrid: schedule must be a Schedule or a function (p, m) that makes "
                          f"one, not {schedule!r}")
    if stage not in (0, 1, 2, 3) or (stage == 3 and schedule.stages > 1):
        raise ConfigError(f"hybrid: stage of ZeRO must be 0, 1, 2 or, without a pipeline, 3; not "
                          f"{stage!r} with {schedule.stages} stages of the pipeline")
    if not stage and (of_zero := {"param_dtype", "offload", "algorithm"} & options.keys()):
        raise ConfigError(f"hybrid: {', '.join(sorted(of_zero))} are options of ZeRO, which needs "
                          f"a stage: stage=1")
    if not all(p.requires_grad for p in gpt.parameters()):
        raise ConfigError("hybrid trains all parameters of a GPT, but some of this one are frozen")
    stages = cut(gpt_layers(shard(gpt, tp, sequence)), schedule.stages)
    mine = [stages[number] for number in schedule.stages_of(pp.rank)]
    module: Any = mine[0] if len(mine) == 1 else nn.ModuleList(mine)
    own = set(module.parameters())
    copy = own & {gpt.tokens.weight} if stages[0] not in mine else set()  # of another stage's
    parts = {}
    for p, name, part in whole_names(gpt):
        original = (part.original if part else tp.rank == 0) and p not in copy
        parts[p] = name, part, original and (stage > 0 or dp.rank == 0)
        if p not in own:
            p.data = p.data.new_empty(0)
    whole_name = {name: parts[p][0] for name, p in module.named_parameters()}
    check_elementwise(optimizer)
    model: SynchronizedModule
    if stage:
        model, made = zero(
            module, dp, stage, optimizer, names=[name for name, *_ in parts.values()],
            groups=groups and (lambda name: groups(whole_name.get(name, name))), **options)
    else:
        model = DataParallel(module, dp)
        made = optimizer(grouped(((name, [p] if p in own else [])
                                  for p, (name, *_) in parts.items()), groups), **options)
    at_once = schedule.stages == 1 and (stage > 1 or schedule.micro_batches == 1)
    pipeline = Pipeline(
        [model] if at_once else mine, schedule, pp, recompute=recompute, seconds=seconds,
        tied={"tokens": gpt.tokens.weight} if gpt.head is None and gpt.tokens.weight in own else {})
    whole = Hybrid(mesh, model, pipeline, at_once, parts, gpt.config.dropout)
    if isinstance(made, Layerwise):
        made.add_up = whole_norms(whole)
    return whole, made


class Hybrid(DistributedModule):
    """This rank's part of a GPT: see `hybrid`.

    model: this rank's stages, synchronized over dp. at_once: are gradients reduced as backward
    computes them? Else after the last micro-batch. parts: for each parameter its name in the whole
    model, which part of it this is, and is it the original, if other ranks have copies?
    """

    module: SynchronizedModule
    sharded = True

    def __init__(self, mesh: Mesh, model: SynchronizedModule, pipeline: Pipeline, at_once: bool,
                 parts: dict[nn.Parameter, tuple[str, ShardMetadata | None, bool]], dropout: float):
        super().__init__()
        self.comm, self.module, self.pipeline, self.at_once = mesh.comm, model, pipeline, at_once
        self.trained = model.trained
        self.dp, self.tp = _axis(mesh, "dp"), _axis(mesh, "tp")
        self.everyone, self.dropout = mesh[tuple(mesh.axes)], dropout
        self.parts = {name: parts[p] for name, p in model.module.named_parameters()}

    def backward(self, tokens: Tensor, targets: Tensor, seeds: Tensor | None = None) -> Tensor:
        """Forward and backward of a batch (b, s), the same on all ranks, and of its samples' seeds
        (b,) for dropout. Returns the mean loss over all targets other than −100, on all ranks; the
        gradients are that of it. Within torch.no_grad(), it only evaluates.

        Seeds that you don't give are drawn on rank 0. Raises `ConfigError` unless dp ·
        micro_batches divides b, and all ranks give the same, by checksums that no trace shows.
        """
        pieces = self.dp.size * self.pipeline.schedule.micro_batches
        if not isinstance(tokens, Tensor) or not isinstance(targets, Tensor):
            raise ConfigError(f"tokens and targets are tensors (b, s), not {short(tokens)} and "
                              f"{short(targets)}")
        if tokens.dim() != 2 or len(tokens) % pieces or not len(tokens):
            raise ConfigError(f"a batch of shape {tuple(tokens.shape)} can't be cut for "
                              f"{self.dp.size} dp ranks with "
                              f"{self.pipeline.schedule.micro_batches} micro-batches each")
        check_same_batch(self.everyone.labelled("backward"), tokens, targets, seeds)
        if seeds is None and self.dropout and self.training:
            seeds = draw_shared_seeds(self.everyone, tokens)
        inputs, labels, *more = (scatter_to(self.dp, x, 0) for x in (tokens, targets, seeds)
                                 if x is not None)
        total = counted(targets) / self.dp.size  # the dp ranks' gradients are averaged
        with nullcontext() if self.at_once else self.module.no_sync():
            loss = self.pipeline.step(inputs, labels, partial(vocab_cross_entropy, self.tp), *more,
                                      total=total)
        if not self.at_once and torch.is_grad_enabled():
            self.module.reduce()
        return all_reduce(self.dp, loss, "avg")

    def forward(self, *_: Any) -> None:
        raise ConfigError("a Hybrid runs in backward(tokens, targets), which only evaluates within "
                          "torch.no_grad(); for outputs, load full_state_dict(model) into a GPT")

    def is_original(self, name: str) -> bool:
        return self.parts[name][2]

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        return self.module.named_gradients()

    def set_zero_gradient(self, p: nn.Parameter) -> None:
        self.module.set_zero_gradient(p)

    def stepped_parts(self) -> list[SteppedPart]:
        found = []
        for name, shape, held, runs, _ in self.module.stepped_parts():
            whole, part, original = self.parts[name]
            if part is not None:
                shape, runs = part.shape, [piece for run in runs for piece in part.runs(*run)]
            found.append(SteppedPart(whole, shape, held, runs, original))
        return found

    def share_parameters(self) -> None:
        self.module.share_parameters()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        with self.module.gathered():
            yield


def _axis(mesh: Mesh, name: str) -> Comm:
    """The ranks along the axis `name`: this one alone if the mesh has none."""
    if unknown := set(mesh.axes) - set(AXES):
        raise ConfigError(f"hybrid knows the axes pp, dp and tp, but the mesh has "
                          f"{', '.join(sorted(unknown))}")
    return mesh[name] if name in mesh.axes else mesh.comm.subgroup([mesh.comm.rank])

