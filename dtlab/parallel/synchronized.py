"""A module whose gradients all ranks reduce when backward ends: what data parallelism and ZeRO have
in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from dtlab.collectives import all_reduce, broadcast
from dtlab.collectives.registry import check_comm
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.parallel.types import REPLICATED, declare


class Region(NamedTuple):
    """What this rank's optimizer steps of the parameter `name`, of this `shape`: each of `runs`,
    (start, at, length), says that the elements of the flattened parameter from `start` on lie in
    the flattened `tensor` from `at` on. Of several ranks' copies, one is the `original`."""

    name: str
    shape: torch.Size
    tensor: nn.Parameter
    runs: list[tuple[int, int, int]]
    original: bool = True


class DistributedModule(nn.Module):
    """A model of which each rank of `comm` has a copy or a part: what clipping and checkpoints need
    to know of it."""

    comm: Comm
    module: nn.Module
    sharded = False  # do ranks step different elements, or all of them everything?

    def counts(self, name: str) -> bool:
        """Is this rank's part of the parameter `name` the original, if other ranks have copies?"""
        return True

    @abstractmethod
    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """The reduced gradients of this rank, or its shards of them (see `sharded`), which are
        views, each with its parameter's name."""

    @abstractmethod
    def regions(self) -> list[Region]:
        """Which elements of which trained parameters this rank's optimizer steps."""

    def full_parameters(self) -> dict[str, Tensor]:
        """Copies of all whole trained parameters by name. All ranks call it."""
        regions = self.regions()
        kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
        mine = {r.name: (r.shape, r.tensor.dtype) for r in regions}
        for theirs in self.comm._all_gather_objects(mine):
            kinds |= theirs
        full = {name: torch.zeros(shape, dtype=dtype, device=self.comm.device)
                for name, (shape, dtype) in kinds.items()}
        for name, _, held, runs, original in regions:
            for start, at, length in runs if original else ():
                values = held.detach().reshape(-1)[at : at + length]
                full[name].view(-1)[start : start + length] = values
        for values in full.values() if self.sharded else ():
            all_reduce(self.comm, values)
        return full

    def share_parameters(self) -> None:
        """After `regions` have changed: other ranks get the new values."""


def check_distributed(model: object, function: str) -> None:
    """Raise `ConfigError` unless `model` is one of these."""
    if not isinstance(model, DistributedModule):
        raise ConfigError(f"{function} takes what DataParallel, zero or hybrid returned, not "
                          f"{type(model).__name__}")


class SynchronizedModule(DistributedModule):
    """`module` on every rank of `comm`; subclasses say how its gradients are reduced.

    Rank 0's parameters and buffers become everyone's at the start, its buffers before each forward
    in training. Raises `ConfigError`, on all ranks, if they hold different models.
    """

    def __init__(self, module: nn.Module, comm: Comm):
        super().__init__()
        check_comm(comm, "a model of several ranks, such as DataParallel(module, comm),")
        check_same_model(module, comm)
        self.module, self.comm = module, comm
        self.trained = [p for p in module.parameters() if p.requires_grad]
        for p in self.trained:
            declare(p, comm, REPLICATED, reduced=True)
        for tensor in (*module.parameters(), *module.buffers()):
            broadcast(comm, tensor.detach(), algorithm="auto")
        self._reduces = True  # False within no_sync
        self.in_backward = False  # in one that ends with reduced gradients
        self.samples: int | None = None  # of this rank since the last reduction, if anyone counts
        self.all_samples = torch.zeros((), dtype=torch.int64, device=comm.device)  # of all ranks

    # ---- what subclasses provide ---------------------------------------------------------------

    @abstractmethod
    def begin_reduction(self) -> None:
        """Backward begins."""

    @abstractmethod
    def finish_reduction(self) -> None:
        """Backward has computed all gradients. Afterwards they are reduced: averages over ranks if
        `samples` is None, else sums divided by `all_samples`."""

    def held(self) -> Iterable[Tensor]:
        """The tensors that this wrapper has made and keeps from step to step."""
        return ()

    def reduce(self) -> None:
        """Reduce the gradients that are there, as backward outside `no_sync` does at its end."""
        self._begin()
        self._finish()

    # ---- forward and backward ------------------------------------------------------------------

    def forward(self, *args: Any, **options: Any) -> Any:
        """What the module returns. Raises `ConfigError` if the parameters that it trains are not
        those any more that were wrapped."""
        now = [p for p in self.module.parameters() if p.requires_grad]
        if len(now) != len(self.trained) or any(
                a is not b for a, b in zip(now, self.trained, strict=True)):
            raise ConfigError(f"rank {self.comm.rank}: the module's trained parameters are not "
                              f"those that were wrapped; freeze or replace them before wrapping")
        reduces = self._reduces and torch.is_grad_enabled()
        if reduces and self.training:
            self._share_buffers()
        outputs = self.module(*args, **options)
        ends = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
        if reduces and ends:
            register_multi_grad_hook(ends, self._backward_begins, mode="any")
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forward passes inside add up on each rank; a backward outside reduces the
        sums. For accumulation over micro-batches."""
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

    def backward(self, loss: Tensor | None, samples: int) -> int:
        """Backward of a `loss` that is the mean over this rank's `samples`, which may differ from
        rank to rank: the gradient is that of the mean over all samples of all ranks (within
        `no_sync`, of their sum). Returns how many there were.

        A rank without samples calls `backward(None, 0)`; once all do, the result is 0, and there
        is no gradient. Traffic: one all-reduce of 8 bytes more.
        """
        if not isinstance(samples, int) or samples < 0 or (loss is None and samples):
            raise ConfigError(f"rank {self.comm.rank}: samples must be a count of what the loss is "
                              f"the mean of, not {samples!r}")
        if self.samples is None and self.named_gradients():
            raise ConfigError(f"rank {self.comm.rank}: gradients are left from the step before; "
                              f"call zero_grad() before backward(loss, samples)")
        self.samples = (self.samples or 0) + samples
        if loss is None and self._reduces and self.training:
            self._share_buffers()
        if loss is not None and samples:
            (loss * samples).backward()
        elif self._reduces:
            self.reduce()
        return int(self.all_samples) if self._reduces else self.samples

    def _share_buffers(self) -> None:
        for buffer in self.module.buffers():
            broadcast(self.comm, buffer, algorithm="auto")

    def _backward_begins(self, _gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise ConfigError(f"rank {self.comm.rank}: gradients made with backward(create_graph="
                              f"True) can't be reduced: nothing would differentiate the messages")
        if not self.in_backward:  # the module may have run several times for one loss
            self._begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _begin(self) -> None:
        self.in_backward = True
        if self.samples is not None:
            self.all_samples.fill_(self.samples)
            all_reduce(self.comm, self.all_samples, algorithm="recursive_doubling")
        self.begin_reduction()

    @torch.no_grad()
    def _finish(self) -> None:
        self.in_backward = False
        self.finish_reduction()
        self.samples = None


def check_same_model(module: nn.Module, comm: Comm) -> None:
    """Raise `ConfigError`, on all ranks, unless all ranks' modules have the same parameters and
    buffers: equal names, shapes, dtypes, and the same ones frozen. Values may differ."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"rank {comm.rank}: need a torch.nn.Module, not {module!r}")
    mine = {name: f"has shape {tuple(p.shape)} and dtype {p.dtype}, and is "
                  f"{'trained' if p.requires_grad else 'frozen'}"
            for name, p in (*module.named_parameters(), *module.named_buffers())}
    everyone = comm._all_gather_objects(mine)
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name in [*first, *theirs]:
            here, there = first.get(name, "is missing"), theirs.get(name, "is missing")
            if here != there:
                raise ConfigError(f"ranks hold different models: {name!r} {here} on rank 0, but "
                                  f"{there} on rank {rank}")
        if list(theirs) != list(first):
            raise ConfigError(f"ranks hold different models: rank {rank} has its parameters in "
                              f"another order than rank 0")
