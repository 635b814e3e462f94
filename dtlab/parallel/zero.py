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
models". Chapters: 13, 13b.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dtlab.checks import is_whole
from dtlab.collectives import all_gather, reduce_scatter
from dtlab.comm import Comm, Work
from dtlab.errors import ConfigError
from dtlab.parallel.hooks import Hook, before_backward_of, in_autograd
from dtlab.parallel.memory import mark
from dtlab.parallel.model_check import check_not_compiled, check_own_memory
from dtlab.parallel.sharded_optimizer import check_elementwise, shard_optimizer
from dtlab.parallel.sharded_parameter import set_local_gradient
from dtlab.parallel.synchronized import SteppedPart, SynchronizedModule
from dtlab.parallel.unit import Unit, in_torch_func, layers_of, parameters_by_layer, saved_as_views


def zero(
    module: nn.Module, comm: Comm, stage: int = 1,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, *,
    layers: Sequence[nn.Module] | None = None, param_dtype: torch.dtype | None = None,
    offload: bool = False, algorithm: str = "auto",
    groups: Callable[[str], dict[str, Any]] | None = None, names: Iterable[str] = (),
    **options: Any,
) -> tuple[Stage1, torch.optim.Optimizer]:
    """(model, optimizer) that train `module` on all ranks of `comm`, each of which keeps 1/N of the
    optimizer state (stage 1), of the gradients as well (2), of the parameters as well (3).

    Train as on one device: `loss = …model(x)…; loss.backward(); optimizer.step();
    optimizer.zero_grad()`, or `model.backward(loss, samples)` where ranks have unequal batches.

    optimizer: a class, called with `options`, whose step treats every element by itself, as torch's
        SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop and ASGD do, and
        others whose class says `elementwise = True`; or LARS or LAMB, whose norms are added up.
        After changes of parameters outside a step, as Lookahead's, call model.share_parameters().
    layers: the modules whose parameters travel together; None: the elements of `module`'s outermost
        nn.ModuleLists and nn.Sequentials. What belongs to none of them, or to several, is one more.
        Stage 3 needs all ranks to call them: of experts that a rank may skip, name the whole block.
    param_dtype: of the parameters that compute, such as torch.bfloat16; the optimizer keeps them in
        the module's own dtype. None: the same.
    offload: keep optimizer state, and do its step, on the CPU.
    algorithm: of the all-gathers and reduce-scatters: a name that both have, such as "ring".
    groups: options of the parameter of this name, such as {"weight_decay": 0.0}, that differ from
        `options`: as many parameter groups as there are different ones. names: of all stages of a
        pipeline, so that all ranks have the same groups.

    Parameters that are frozen stay whole. Traffic of a step: the module's table. Beside it ranks
    tell each other which gradients they have, in messages of a few bytes that no trace shows.
    Raises `ConfigError` if ranks hold different models, or parameters have several dtypes.
    """
    if not is_whole(stage) or stage not in STAGES:
        raise ConfigError(f"ZeRO has the stages 1, 2 and 3, not {stage!r}")
    check_elementwise(optimizer)
    model = STAGES[stage](module, comm, layers, param_dtype, offload, algorithm)
    return model, shard_optimizer(model, optimizer, groups, names, options)


class Stage1(SynchronizedModule):
    """Optimizer state is sharded: each rank reduces, steps and hands out its own part."""

    sharded = True

    def __init__(self, module: nn.Module, comm: Comm, layers: Sequence[nn.Module] | None,
                 dtype: torch.dtype | None, offload: bool, algorithm: str):
        super().__init__(module, comm, algorithm, dtype)
        check_own_memory(module)
        dtypes = {p.dtype for p in self.trained}
        if len(dtypes) != 1:
            raise ConfigError(f"ZeRO needs trained parameters of one dtype, not of {len(dtypes)}; "
                              f"convert the module, for example with module.float()")
        for p in module.parameters():
            if not p.requires_grad and p.is_floating_point():
                p.data = p.data.to(dtype or p.dtype)
        self.layers = [module, *layers_of(module, layers)]
        self.owned = parameters_by_layer(self.layers)
        self.units = [Unit(names, comm, dtype or self.trained[0].dtype, offload,
                           self.keeps_parameters) for names in self.owned if names]
        self._unit_of = {p: unit for unit in self.units for p in unit.parameters}
        self._wrapped = self._trained_kinds()  # now of `dtype`

    def held(self) -> Iterable[Tensor]:
        return [unit.whole for unit in self.units if unit.whole is not None]

    def check_parameters(self) -> None:
        super().check_parameters()
        for unit in self.units:
            unit.check()

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        return [named for unit in self.units for named in unit.named_gradients()]

    def set_zero_gradient(self, p: nn.Parameter) -> None:
        self._unit_of[p].set_zero_gradient(p)

    def stepped_parts(self) -> list[SteppedPart]:
        for unit in self.units:
            unit.take_writes()
        return [SteppedPart(unit.names[p], p.shape, piece.master,
                            [(piece.start, 0, len(piece.master))])
                for unit in self.units for p, piece in unit.pieces.items()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; those that are reduced become None, or zeros."""
        self.wait_for_launched()
        for unit in self.units:
            unit.gradients = None
            unit.computed.clear()
            if set_to_none:
                unit.gradient = None
                unit.reduced.clear()
            elif unit.gradient is not None:
                unit.gradient.zero_()
        for p in self.trained:
            set_local_gradient(p, None)

    def begin_reduction(self) -> None:
        for unit in self.units:
            unit.awaited = set(unit.parameters)

    def gradient_ready(self, p: nn.Parameter) -> None:
        self._unit_of[p].add_gradient(p)

    def reduced(self, comm: Comm, unit: Unit) -> Tensor:
        """This rank's shard of all ranks' gradients, in the memory of its own."""
        rows = unit.take_gradients().view(comm.size, -1)
        return self.mean(rows, lambda rows: reduce_scatter(
            comm.labelled(unit.label), rows, algorithm=self.algorithm, overwrite=True))

    def finish_reduction(self) -> None:
        for unit in reversed(self.units):
            unit.add_reduced(self.reduced(self.comm, unit))
        self.find_reduced()

    def find_reduced(self) -> None:
        """A parameter that has a gradient on no rank has none: its optimizer leaves it alone."""
        trained = [p for unit in self.units for p in unit.parameters]
        mine = {number for number, p in enumerate(trained)
                if self.samples != 0 and p in self._unit_of[p].computed}
        for number in set().union(*self.comm._all_gather_objects(mine)):
            self._unit_of[trained[number]].reduced.add(trained[number])
        for unit in self.units:
            unit.computed.clear()

    def hand_gradients_to_optimizer(self) -> None:
        """Give the optimizer's parameters, pieces of the shards, gradients before its step."""
        for unit in self.units:
            if unit.has_gradients():
                raise ConfigError(f"rank {self.comm.rank}: gradients of {unit.label} are not "
                                  f"reduced; end accumulation outside no_sync or by model.reduce()")
            unit.take_writes()
            unit.assign_gradients()

    @torch.no_grad()
    def share_parameters(self) -> None:
        """After the optimizer's step, or a load: each rank hands out its shard."""
        for unit in self.units:
            unit.take_step()
        for unit in self.units:
            assert unit.whole is not None
            self.gather(self.comm, unit, unit.whole)

    def gather(self, comm: Comm, unit: Unit, whole: Tensor) -> None:
        """Gather `whole` from all ranks' shards."""
        all_gather(comm.labelled(unit.label), unit.shard, algorithm=self.algorithm,
                   out=whole.view(comm.size, -1))


class Stage2(Stage1):
    """Gradients are sharded, too: a layer's are reduced while backward computes those of the layer
    before, and only a shard of them stays."""

    def begin_reduction(self) -> None:
        super().begin_reduction()
        self._reductions = self.comm.subgroup(range(self.comm.size))  # have a stream of their own

    def gradient_ready(self, p: nn.Parameter) -> None:
        super().gradient_ready(p)
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
        unit.add_reduced(self.reduced(comm, unit))

    def finish_reduction(self) -> None:
        while len(self._launched) < len(self.units):  # some parameters had no gradient
            self._launch_reduction()
        self.wait_for_launched()
        for unit in reversed(self.units):  # what came after its unit had left, as in `DataParallel`
            if unit.has_gradients():
                self._add_reduced(self.comm, unit)
        self.find_reduced()


class Stage3(Stage2):
    """Parameters are sharded, too: a layer's are gathered before it runs, forward and backward,
    while the one before it runs, and freed afterwards."""

    keeps_parameters = False

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._gathers: dict[Unit, tuple[Work, Tensor]] = {}  # under way
        self._gathered_depth = 0  # of `gathered` contexts, one within the other
        self._in_forward = list[Unit]()  # whose layers run, also within a checkpointed layer
        for unit in self.units:
            unit.use = self._use
        for layer, names in zip(self.layers, self.owned, strict=True):
            if names:
                self._hook(layer, self._unit_of[next(iter(names))])
        root = 1 if self.owned[0] else 0  # its unit is the first one, forward and backward
        self._backward_order = self.units[:root] + self.units[root:][::-1]
        self.module.register_forward_hook(always_call=True, hook=Hook(  # layers that do not run
            lambda *_: [*map(self._free, list(self._gathers))]))
        self.module.register_load_state_dict_pre_hook(Hook(lambda *_: self._gather_all()))
        self.module.register_load_state_dict_post_hook(Hook(lambda *_: self._free_all()))

    def held(self) -> Iterable[Tensor]:
        return [*super().held(), *(unit.shard for unit in self.units)]

    def _hook(self, layer: nn.Module, unit: Unit) -> None:
        """Have `unit` gathered and freed whenever `layer` runs."""

        def gather(*_: Any) -> None:
            in_torch_func(allowed=unit.whole is not None)
            self._use(unit)

        def end_forward(_layer: nn.Module, _inputs: Any, outputs: Any) -> None:
            self._in_forward.remove(unit)
            if not in_autograd() and not self._gathered_depth:  # unless checkpointing runs it again
                unit.take_row()
                unit.free()
            before_backward_of(outputs, gather)

        layer.register_forward_pre_hook(Hook(gather), prepend=True)  # others read weights
        layer.register_forward_pre_hook(Hook(lambda *_: self._in_forward.append(unit)),
                                        prepend=True)
        layer.register_forward_hook(Hook(end_forward), always_call=True)

    forward = torch._disable_dynamo(Stage2.forward)  # it would trace parameters without values

    def run_module(self, *args: Any, **options: Any) -> Any:
        """Backward gathers again what forward has freed: see `saved_as_views`."""
        check_not_compiled(self.module)
        if in_torch_func(allowed=self._gathered_depth > 0):  # it takes no such hooks
            return super().run_module(*args, **options)
        with saved_tensors_hooks(*saved_as_views(self.units, self._use)):
            return super().run_module(*args, **options)

    @torch.inference_mode(False)  # what is gathered there may be used in training, too
    def _use(self, unit: Unit) -> Tensor:
        """`unit`'s parameters are needed now, and soon those of the unit that follows."""
        self._prefetch(unit)
        if unit in self._gathers:
            work, whole = self._gathers.pop(unit)
            work.wait()
            unit.open(whole)
        assert unit.whole is not None
        whole, order = unit.whole, self.units
        if in_autograd():
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._free(unit))
            order = self._backward_order
        for following in order[order.index(unit) + 1 :][:1]:
            self._prefetch(following)
        return whole

    def _prefetch(self, unit: Unit) -> None:
        """Begin to gather `unit`, unless it is there."""
        if unit.whole is None and unit not in self._gathers:
            whole = mark(unit.shard.new_empty(unit.numel), "parameters")
            self._gathers[unit] = self.comm.begin(self.gather, unit, whole), whole

    def _free(self, unit: Unit) -> None:
        if unit in self._gathers:
            self._gathers.pop(unit)[0].wait()
        if not self._gathered_depth and unit not in self._in_forward:
            unit.free()

    def _launch_reduction(self) -> None:
        unit = self._next
        super()._launch_reduction()
        self._free(unit)

    @torch.no_grad()
    def share_parameters(self) -> None:
        for unit in self.units:
            unit.take_step()
        for unit in self.units:
            self._free(unit)
            if unit.whole is not None:
                self.gather(self.comm, unit, unit.whole)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        self._gather_all()
        try:
            yield
        finally:
            self._free_all()

    def _gather_all(self) -> None:
        for unit in self.units:
            self._use(unit)
        self._gathered_depth += 1

    def _free_all(self) -> None:
        self._gathered_depth -= 1
        for unit in self.units:
            unit.take_writes()
            self._free(unit)


STAGES: dict[int, type[Stage1]] = {1: Stage1, 2: Stage2, 3: Stage3}
