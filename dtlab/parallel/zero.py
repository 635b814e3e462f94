"""ZeRO: data parallelism in which no two ranks keep the same optimizer state (stage 1), gradients
(stage 2), parameters (stage 3). Each stage is the class before plus one idea.

Ψ parameters, N ranks; bf16 parameters and gradients, float32 Adam. Bytes a rank, and elements it
sends in a step, times (N−1)/N:

| stage | parameters | gradients | optimizer state | sends |
|-------|------------|-----------|-----------------|-------|
| none  | 2Ψ         | 2Ψ        | 12Ψ             | 2Ψ    |
| 1     | 2Ψ         | 2Ψ        | 12Ψ/N           | 2Ψ    |
| 2     | 2Ψ         | 2Ψ/N      | 12Ψ/N           | 2Ψ    |
| 3     | 2Ψ/N       | 2Ψ/N      | 12Ψ/N           | 3Ψ    |

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter
models". Chapter: 13.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from dtlab.collectives import all_gather, reduce_scatter
from dtlab.comm import Comm, Work
from dtlab.errors import ConfigError
from dtlab.parallel.memory import mark
from dtlab.parallel.sharded_optimizer import check_elementwise, shard_optimizer
from dtlab.parallel.synchronized import Region, SynchronizedModule
from dtlab.parallel.unit import Unit, layers_of, parameters_by_layer


def zero(
    module: nn.Module, comm: Comm, stage: int = 1,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, *,
    layers: Sequence[nn.Module] | None = None, param_dtype: torch.dtype | None = None,
    offload: bool = False, algorithm: str = "auto", **options: Any,
) -> tuple[Stage1, torch.optim.Optimizer]:
    """(model, optimizer) that train `module` on all ranks of `comm`, each of which keeps 1/N of the
    optimizer state (stage 1), of the gradients as well (2), of the parameters as well (3).

    Train as on one device: `loss = …model(x)…; loss.backward(); optimizer.step();
    optimizer.zero_grad()`, or `model.backward(loss, samples)` where ranks have unequal batches.

    optimizer: a class, called with `options`, whose step treats every element by itself: one of
        torch's `ELEMENTWISE`, or one that says so by `elementwise = True`. Its hooks run around
        the step of this rank's shards, before the new parameters are handed out.
    layers: the modules whose parameters travel together; None: the elements of `module`'s outermost
        nn.ModuleLists and nn.Sequentials. What belongs to none of them, or to several, is one more.
    param_dtype: of the parameters that compute, such as torch.bfloat16; the optimizer keeps them in
        the module's own dtype. None: the same.
    offload: keep optimizer state, and do its step, on the CPU.
    algorithm: of the all-gathers and reduce-scatters.

    Parameters that are frozen stay whole. One without a gradient counts as one with gradient 0.
    Raises `ConfigError` if ranks hold different models, or parameters have several dtypes.
    """
    if isinstance(stage, bool) or not isinstance(stage, Integral) or stage not in STAGES:
        raise ConfigError(f"ZeRO has the stages 1, 2 and 3, not {stage!r}")
    check_elementwise(optimizer)
    model = STAGES[stage](module, comm, layers, param_dtype, offload, algorithm)
    return model, shard_optimizer(model, optimizer, options)


class Stage1(SynchronizedModule):
    """Optimizer state is sharded: each rank reduces, steps and hands out its own part."""

    sharded = True

    def __init__(self, module: nn.Module, comm: Comm, layers: Sequence[nn.Module] | None,
                 dtype: torch.dtype | None, offload: bool, algorithm: str):
        super().__init__(module, comm)
        dtypes = {p.dtype for p in self.trained}
        if len(dtypes) != 1:
            raise ConfigError(f"ZeRO needs trained parameters of one dtype, not of {len(dtypes)}; "
                              f"convert the module, for example with module.float()")
        for p in module.parameters():
            if not p.requires_grad and p.is_floating_point():
                p.data = p.data.to(dtype or p.dtype)
        self.algorithm = algorithm
        self.layers = [module, *(layers_of(module) if layers is None else layers)]
        self.units = [Unit(parameters, comm, dtype or self.trained[0].dtype, offload)
                      for parameters in parameters_by_layer(self.layers) if parameters]
        self._unit_of = {p: unit for unit in self.units for p in unit.parameters}
        for p in self.trained:
            p.register_post_accumulate_grad_hook(self.gradient_is_there)

    def held(self) -> Iterable[Tensor]:
        return [unit.whole for unit in self.units]

    def _names(self) -> dict[nn.Parameter, str]:
        return {p: name for name, p in self.module.named_parameters()}

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        names = self._names()
        return [(names[p], unit.gradient[at : at + count])
                for unit in self.units if unit.gradient is not None
                for p, _, at, count in unit.my_parts(self.comm.rank)]

    def regions(self) -> list[Region]:
        names = self._names()
        return [Region(names[p], p.shape, unit.master, [(start, at, count)])
                for unit in self.units for p, start, at, count in unit.my_parts(self.comm.rank)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        for unit in self.units:
            unit.gradients = unit.gradient = None
        for p in self.trained:
            p.grad = None

    def begin_reduction(self) -> None:
        for unit in self.units:
            unit.awaited = set(unit.parameters)

    def gradient_is_there(self, p: nn.Parameter) -> None:
        """Backward has computed `p.grad`."""
        if self.in_backward:
            self._unit_of[p].add_gradient(p)

    def reduced(self, comm: Comm, unit: Unit) -> Tensor:
        """This rank's shard of all ranks' gradients, in the memory of its own."""
        rows = unit.take_gradients().view(comm.size, -1)
        op = "avg" if self.samples is None else "sum"
        return reduce_scatter(comm, rows, op, algorithm=self.algorithm, overwrite=True)

    def finish_reduction(self) -> None:
        for unit in reversed(self.units):
            mine = self.reduced(self.comm, unit)
            unit.gradient = mine if unit.gradient is None else unit.gradient.add_(mine)
        self.divide_by_samples()

    def divide_by_samples(self) -> None:
        """The end of a reduction that counts samples."""
        if self.samples is not None:
            for unit in self.units:
                assert unit.gradient is not None
                unit.gradient /= max(int(self.all_samples), 1)

    def hand_gradients_to_optimizer(self) -> None:
        """Before the optimizer's step: its parameters are the shards."""
        for unit in self.units:
            gradient, unit.gradient = unit.gradient, None
            unit.master.grad = gradient if gradient is None else gradient.to(unit.master)

    @torch.no_grad()
    def share_parameters(self) -> None:
        """After the optimizer's step, or a load: each rank hands out its shard."""
        for unit in self.units:
            unit.take_step()
            self.gather(self.comm, unit)

    def gather(self, comm: Comm, unit: Unit) -> None:
        """`unit.whole` from all ranks' shards."""
        all_gather(comm, unit.shard, algorithm=self.algorithm, out=unit.whole.view(comm.size, -1))


class Stage2(Stage1):
    """And gradients: a layer's are reduced while backward computes those of the layer before, and
    only a shard of them stays."""

    def begin_reduction(self) -> None:
        super().begin_reduction()
        self._launched: list[Work] = []  # the reductions under way, from the last unit on
        self._reductions = self.comm.subgroup(range(self.comm.size))  # have a stream of their own

    def gradient_is_there(self, p: nn.Parameter) -> None:
        super().gradient_is_there(p)
        if self.in_backward:
            self._unit_of[p].awaited.discard(p)
            while len(self._launched) < len(self.units) and not self._next.awaited:
                self._launch_reduction()

    @property
    def _next(self) -> Unit:
        """The unit to be reduced next: the same order on all ranks."""
        return self.units[-1 - len(self._launched)]

    def _launch_reduction(self) -> None:
        unit = self._next
        if unit.gradient is None:
            unit.gradient = mark(torch.zeros_like(unit.shard), "gradients")
        self._launched.append(self._reductions.begin(self._add_reduced, unit))

    def _add_reduced(self, comm: Comm, unit: Unit) -> None:
        assert unit.gradient is not None
        unit.gradient += self.reduced(comm, unit)

    def finish_reduction(self) -> None:
        while len(self._launched) < len(self.units):  # some parameters had no gradient
            self._launch_reduction()
        for work in self._launched:
            work.wait()
        self.divide_by_samples()


class Stage3(Stage2):
    """And parameters: a layer's are gathered before it runs, forward and backward, while the one
    before it runs, and freed afterwards."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._gathers: dict[Unit, Work] = {}  # under way
        for unit in self.units:
            shard = mark(unit.shard.clone(), "parameters")
            if unit.master.data_ptr() == unit.shard.data_ptr():
                unit.master.data = shard
            unit.shard = shard
            self._free(unit)
        owned = parameters_by_layer(self.layers)
        for layer, parameters in zip(self.layers, owned, strict=True):
            if parameters:
                self._hook(layer, self._unit_of[parameters[0]])
        root = 1 if owned[0] else 0  # it begins first, both ways
        self._backward_order = self.units[:root] + self.units[root:][::-1]

    def held(self) -> Iterable[Tensor]:
        return [*super().held(), *(unit.shard for unit in self.units)]

    def _hook(self, layer: nn.Module, unit: Unit) -> None:
        """Have `unit` gathered and freed whenever `layer` runs."""

        def before(*_: Any) -> None:
            self._use(unit)

        def after(_layer: nn.Module, _inputs: Any, outputs: Any) -> None:
            if not in_autograd():  # unless checkpointing runs it again
                self._free(unit)
            ends = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
            if ends:
                register_multi_grad_hook(ends, before, mode="any")

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)

    def _use(self, unit: Unit) -> None:
        """`unit`'s parameters are needed now, and soon those of the unit that follows."""
        self._prefetch(unit)
        if unit in self._gathers:
            self._gathers.pop(unit).wait()
        order = self._backward_order if in_autograd() else self.units
        if in_autograd():
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._free(unit))
        for following in order[order.index(unit) + 1 :][:1]:
            self._prefetch(following)

    def _prefetch(self, unit: Unit) -> None:
        """Begin to gather `unit`, unless it is there."""
        storage = unit.whole.untyped_storage()
        if not storage.nbytes():
            storage.resize_(unit.whole.numel() * unit.whole.itemsize)
            self._gathers[unit] = self.comm.begin(self.gather, unit)

    def _free(self, unit: Unit) -> None:
        if unit in self._gathers:
            self._gathers.pop(unit).wait()
        unit.whole.untyped_storage().resize_(0)

    def _launch_reduction(self) -> None:
        unit = self._next
        super()._launch_reduction()
        self._free(unit)

    @torch.no_grad()
    def share_parameters(self) -> None:
        for unit in self.units:
            unit.take_step()


STAGES: dict[int, type[Stage1]] = {1: Stage1, 2: Stage2, 3: Stage3}


def in_autograd() -> bool:
    """Does backward run, also one that doesn't reduce?"""
    return bool(torch._C._current_graph_task_id() != -1)
