"""A module whose gradients all ranks reduce when backward ends: what data parallelism and ZeRO have
in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtlab.collectives import all_reduce, broadcast
from dtlab.collectives.registry import check_algorithm, check_comm
from dtlab.comm import Comm, Work
from dtlab.errors import ConfigError
from dtlab.parallel.hooks import GradientHook, Hook, before_backward_of, in_autograd, owners_of
from dtlab.parallel.model_check import check_dtype, check_model, check_outermost
from dtlab.parallel.types import REPLICATED, declare


class SteppedPart(NamedTuple):
    """The part of the parameter `name`, of this `shape`, that this rank's optimizer steps: each of
    `runs`, (start, at, length), says that the elements of the flattened parameter from `start` on
    lie in the flattened `tensor` from `at` on. Of several ranks' copies, one is the `original`."""

    name: str
    shape: torch.Size
    tensor: nn.Parameter
    runs: list[tuple[int, int, int]]
    original: bool = True


class DistributedModule(nn.Module):
    """A model of which each rank has a copy or a part: what clipping and checkpoints need of it."""

    comm: Comm
    module: nn.Module
    trained: list[nn.Parameter]  # on this rank; between steps they may be frozen and unfrozen
    sharded = False  # do ranks step different elements, or all of them everything?
    saving: Work | None = None  # the checkpoint that is being written, beside training
    checkpoints: Mapping[Path, int] = MappingProxyType({})  # by folder: which counted last

    def is_original(self, name: str) -> bool:
        """Is this rank's part of the parameter `name` the original, if other ranks have copies?"""
        return True

    @abstractmethod
    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """The reduced gradients of this rank, or its shards of them (see `sharded`), which are
        views, each with its parameter's name."""

    @abstractmethod
    def set_zero_gradient(self, p: nn.Parameter) -> None:
        """Give `p`, which has no reduced gradient, one of zeros."""

    @abstractmethod
    def stepped_parts(self) -> list[SteppedPart]:
        """Return what this rank's optimizer steps of the trained parameters that have elements."""

    def full_parameters(self) -> dict[str, Tensor]:
        """Copies of all whole trained parameters by name. All ranks call it."""
        parts = self.stepped_parts()
        kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
        mine = {part.name: (part.shape, part.tensor.dtype) for part in parts}
        for theirs in self.comm.labelled("full_state_dict")._all_gather_objects(mine):
            kinds |= theirs
        full = {name: torch.zeros(shape, dtype=dtype, device=self.comm.device)
                for name, (shape, dtype) in kinds.items()}
        for name, _, held, runs, original in parts:
            for start, at, length in runs if original else ():
                values = held.detach().reshape(-1)[at : at + length]
                full[name].view(-1)[start : start + length] = values
        for values in full.values() if self.sharded else ():
            all_reduce(self.comm, values)
        return full

    def share_parameters(self) -> None:
        """Give other ranks the new values, after `stepped_parts` have changed."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, each parameter of this rank's modules is whole, to be read or changed; changes,
        the same on all ranks, stay. All ranks enter. Cost: with ZeRO 3 an all-gather of all."""
        yield

    def __reduce_ex__(self, protocol: object) -> Any:  # of copying, too
        raise ConfigError(f"{type(self).__name__} can't be copied or pickled with its communicator:"
                          f" copy its .module, or save its full_state_dict")


def check_distributed(model: object, function: str) -> None:
    """Raise `ConfigError` unless `model` is one of these."""
    if not isinstance(model, DistributedModule):
        raise ConfigError(f"{function} takes what DataParallel, zero or hybrid returned, not "
                          f"{type(model).__name__}; a model with tensor-parallel layers alone is "
                          f"DataParallel(model, comm.split(comm.rank))")


_counted_by: dict[int, SynchronizedModule] = {}  # by autograd's number of a backward under way


class SynchronizedModule(DistributedModule):
    """`module` on every rank of `comm`; subclasses say how its gradients are reduced.

    Rank 0's parameters and buffers become everyone's at the start, its buffers before the first
    forward of a step in training: before a second one, backward may still need what the first one
    has used. algorithm, dtype: of the collectives that reduce, and of what is sent. Raises
    `ConfigError`, on all ranks, if they hold different models.
    """

    keeps_parameters = True  # in whole, from step to step?

    def __init__(self, module: nn.Module, comm: Comm, algorithm: str, dtype: torch.dtype | None):
        super().__init__()
        check_comm(comm, "a model of several ranks, such as DataParallel(module, comm),")
        check_model(module, comm.labelled("zero" if self.sharded else "DataParallel"))
        self.module, self.comm, self.algorithm = module, comm, algorithm
        for collective in ("reduce_scatter", "all_gather") if self.sharded else ("all_reduce",):
            check_algorithm(collective, algorithm)
        self.names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self.trained = list(self.names)
        if any(self.sharded or wrapper.sharded for p in self.trained for wrapper in owners_of(p)):
            raise ConfigError("ZeRO shards parameters that no other wrapper reduces, but some of "
                              "this module were wrapped before; wrap each module once")
        if not self.trained:
            raise ConfigError("the module trains no parameter, so that there is nothing to reduce; "
                              "call it as it is")
        check_dtype(dtype, self.trained)
        for p in self.trained:
            declare(p, comm, REPLICATED, reduced=True)
            for wrapper in owners_of(p):
                if wrapper.comm is comm:  # the module is wrapped anew, as after unfreezing a layer
                    wrapper._hooks[p].remove()
        for tensor in (*module.parameters(), *module.buffers()):
            broadcast(comm, tensor.detach(), algorithm="auto")
        self._hooks: dict[Tensor, Any] = {
            p: p.register_post_accumulate_grad_hook(GradientHook(self._gradient_hook))
            for p in self.trained if p.numel()}
        # It lives as long as the module; a copy of the module has none.
        vars(module).setdefault("_wrappers", {})[id(comm)] = Hook(self._gradient_hook)
        self._wrapped = self._trained_kinds()
        self._sync = True  # False within no_sync
        self._last_sync = True  # did the last forward run outside no_sync?
        self._reduction_due = False  # has one run outside since the last reduction?
        self.in_backward = False  # does a backward run that ends with reduced gradients?
        self._finish_queued = False  # does autograd call `_leave_backward` at its end?
        self.samples: int | None = None  # of this rank since the last reduction, if anyone counts
        self.all_samples = torch.zeros((), dtype=torch.int64, device=comm.device)  # of all ranks
        self._buffers_shared = False  # do all ranks have rank 0's buffers in this step?
        self._in_own_backward = False  # does `backward` run, which ends the reduction itself?
        self._launched: list[Work] = []  # this backward's reductions under way, in order

    # ---- what subclasses provide ---------------------------------------------------------------

    @abstractmethod
    def begin_reduction(self) -> None:
        """Backward begins."""

    @abstractmethod
    def gradient_ready(self, p: nn.Parameter) -> None:
        """Note, in a backward that reduces, that it has computed `p.grad`."""

    @abstractmethod
    def finish_reduction(self) -> None:
        """Backward has computed all gradients. Afterwards they are sums over ranks, divided by
        the number of ranks or samples: see `mean`."""

    def held(self) -> Iterable[Tensor]:
        """The tensors that this wrapper has made and keeps from step to step."""
        return ()

    def mean(self, gradients: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
        """Divide `add(gradients)`, their sum over ranks, in place, by the number of ranks, or by
        `all_samples` if samples are counted. Half precision is divided first: sums overflow."""
        divisor = self.comm.size if self.samples is None else max(int(self.all_samples), 1)
        if self.samples == 0:
            gradients.zero_()  # the mean of nothing is nan, and 0 times that, too
        if gradients.dtype.itemsize == 2:
            gradients /= divisor
            return add(gradients)
        return add(gradients).div_(divisor)

    def wait_for_launched(self) -> None:
        """Wait for the reductions under way, those of a backward that raised among them."""
        for work in self._launched:
            work.wait()
        self._launched = []

    def reduce(self) -> None:
        """Reduce the gradients that are there, as backward outside `no_sync` does at its end."""
        if not self.in_backward:
            self._begin()
        self._finish()

    # ---- forward and backward ------------------------------------------------------------------

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the module. Raises `ConfigError` if it trains other parameters than were wrapped."""
        check_outermost()
        self.check_parameters()
        if torch.is_grad_enabled():
            if in_autograd():  # reentrant checkpointing: the hooks see another backward
                self._check_counted()
            else:
                self.in_backward = self._finish_queued = False  # the last one may have raised
                self.wait_for_launched()
            self._last_sync = self._sync
            self._reduction_due |= self._sync
            if self._sync and self.training:
                self._share_buffers()
        outputs = self.run_module(*args, **options)
        before_backward_of(outputs, GradientHook(self._enter_backward))
        return outputs

    def run_module(self, *args: Any, **options: Any) -> Any:
        """The module's own forward."""
        try:
            return self.module(*args, **options)
        except RuntimeError as error:
            dtype = self.trained[0].dtype
            if "dtype" in str(error) and dtype.itemsize == 2:
                raise ConfigError(f"rank {self.comm.rank}: the module computes in {dtype}; convert "
                                  f"its inputs with x.to({dtype}), or its buffers or parameters: "
                                  f"{error}") from error
            raise

    def _trained_kinds(self) -> list[Any]:
        return [(id(p), p.dtype, p.device) for p in self.module.parameters()
                if p.requires_grad or p in self.names]  # which may be frozen for a while

    def check_parameters(self) -> None:
        """Raise `ConfigError` unless the module trains the parameters that were wrapped."""
        if self._trained_kinds() != self._wrapped:
            raise ConfigError(f"rank {self.comm.rank}: the module's trained parameters are not "
                              f"those that were wrapped; unfreeze, convert or replace them before "
                              f"wrapping")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: gradients of forward passes inside add up on each rank until a backward
        outside, or `reduce()`. A step before moves ranks apart, as in DDP; with ZeRO it raises."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def backward(self, loss: Tensor | None, samples: int) -> int:
        """Backward of a `loss` that is the mean over this rank's `samples`, which may differ from
        rank to rank: the gradient is that of the mean over all samples of all ranks (within
        `no_sync`, of their sum). Returns how many there were.

        A rank without samples calls `backward(None, 0)`; once all do, the result is 0, and there
        is no gradient. With ZeRO 3 it runs the model on an empty batch, or on any, as many models
        take no empty one, and calls `backward(loss, 0)`. Traffic: one all-reduce of 8 bytes more.
        """
        if loss is None and not self.keeps_parameters:
            raise ConfigError(f"rank {self.comm.rank}: with ZeRO 3 all ranks gather each layer; "
                              f"without samples, run the model on an empty batch, such as x[:0], "
                              f"or, if it takes none, on any, and call backward(loss, 0)")
        if not isinstance(samples, int) or samples < 0 or (loss is None and samples):
            raise ConfigError(f"rank {self.comm.rank}: samples must be a count of what the loss is "
                              f"the mean of, not {samples!r}")
        if all(p.grad is None for p in self.trained):
            self.samples = None  # those of an accumulation that was dropped don't count
        elif self.samples is None:
            raise ConfigError(f"rank {self.comm.rank}: gradients are left from the step before; "
                              f"call zero_grad(), which sets them to None, before backward(loss, "
                              f"samples)")
        self.samples = (self.samples or 0) + samples
        self._reduction_due = reduces = self._sync
        if reduces:
            if loss is None and self.training:
                self._share_buffers()
            self.all_samples.fill_(self.samples)
            all_reduce(self.comm, self.all_samples, algorithm="recursive_doubling")
        if loss is not None:
            self._run_backward(loss * samples)
        if not reduces:
            return self.samples
        self.reduce()
        return int(self.all_samples)

    def _share_buffers(self) -> None:
        for name, buffer in () if self._buffers_shared else self.module.named_buffers():
            broadcast(self.comm.labelled(f"the buffer {name}"), buffer, algorithm="auto")
        self._buffers_shared = True

    def _run_backward(self, weighted: Tensor) -> None:
        """Run backward of a loss times its samples, which reaches no other wrapped model."""
        self._in_own_backward = True
        if weighted.requires_grad:
            weighted.register_hook(lambda _: _counted_by.update(
                {torch._C._current_graph_task_id(): self}))
        try:
            weighted.backward()
        finally:
            self._in_own_backward = False
            for number in [n for n, model in _counted_by.items() if model is self]:
                del _counted_by[number]

    def _check_counted(self) -> None:
        """Raise `ConfigError` in the `backward` of another model."""
        if _counted_by.get(torch._C._current_graph_task_id(), self) is not self:
            raise ConfigError(f"rank {self.comm.rank}: backward(loss, samples) of a wrapped model "
                              "reaches another, which doesn't count its samples; wrap both "
                              "together, for example in one nn.ModuleList")

    def _gradient_hook(self, p: nn.Parameter) -> None:
        """Backward has computed `p.grad`. The first one begins the reduction."""
        self._check_counted()
        if not (self._reduction_due or (self._sync and self._last_sync)):
            return
        if torch.is_grad_enabled():
            raise ConfigError(f"rank {self.comm.rank}: gradients made with backward(create_graph="
                              f"True) can't be reduced: nothing would differentiate the messages")
        if not self.in_backward:
            self._begin()
            if not (self._in_own_backward or self._finish_queued):
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self.gradient_ready(p)

    def _enter_backward(self, *_: Any) -> None:
        """The gradient of an output is there, so this is the whole backward, and not the one that
        reentrant checkpointing runs within it. It may be one that only differentiates inputs."""
        self._finish_queued = not self._in_own_backward
        torch.autograd.Variable._execution_engine.queue_callback(self._leave_backward)

    def _leave_backward(self) -> None:
        if self._finish_queued and self.in_backward:
            self._finish()
        self._finish_queued = False

    def _begin(self) -> None:
        self.check_parameters()
        self.in_backward = True
        self.begin_reduction()

    @torch.no_grad()
    def _finish(self) -> None:
        self.in_backward = self._reduction_due = self._buffers_shared = False
        self.finish_reduction()
        self.samples = None
