"""Data parallelism: every rank holds the whole model and computes the gradients of its own samples;
all average them before each takes the same step.

Four strategies, each the one before plus one idea. They differ in two things only: which gradients
travel together, and when they leave.

| strategy    | together                         | leave                              |
|-------------|----------------------------------|------------------------------------|
| "parameter" | those of one parameter           | after backward                     |
| "flat"      | all                              | after backward                     |
| "bucket"    | `bucket_bytes`, last layer first | after backward                     |
| "overlap"   | `bucket_bytes`, last layer first | during backward, once they are there |

Source: Li et al. 2020, "PyTorch Distributed: experiences on accelerating data parallel training".
Chapter: 10.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from dtlab.collectives import all_reduce, broadcast
from dtlab.comm import Comm, Work
from dtlab.errors import ConfigError
from dtlab.parallel.agreement import check_same_model

STRATEGIES = ("parameter", "flat", "bucket", "overlap")


class Bucket:
    """Parameters of one dtype whose gradients travel as one vector."""

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None):
        self.parameters = parameters
        sizes = [p.numel() for p in parameters]
        self.flat = torch.empty(sum(sizes), dtype=dtype or parameters[0].dtype,
                                device=parameters[0].device)
        self.slots = [piece.view(p.shape)
                      for piece, p in zip(self.flat.split(sizes), parameters, strict=True)]
        self.firsts = torch.tensor([sum(sizes[:i]) for i in range(len(sizes))])
        self.awaited = set(parameters)  # those whose gradient this backward has not computed yet

    def fill(self) -> None:
        """Copy the gradients in. A parameter without one adds −0.0, the only number that changes no
        other and that no sum with a gradient results in: gradients have +0.0 instead (the first
        element of each will do)."""
        for p, slot in zip(self.parameters, self.slots, strict=True):
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise ConfigError("DataParallel needs dense gradients; make embeddings with "
                                  "sparse=False")
            if p.grad.requires_grad:
                raise ConfigError("DataParallel can't average gradients made with "
                                  "backward(create_graph=True): nothing would differentiate "
                                  "through the messages")
            if p.grad.data_ptr() != slot.data_ptr() or p.grad.dtype != slot.dtype:
                slot.copy_(p.grad)
        self.flat[self.firsts] += 0.0
        for p, slot in zip(self.parameters, self.slots, strict=True):
            if p.grad is None:
                slot.fill_(-0.0)

    def hand_out(self) -> None:
        """Each parameter gets its averaged gradient, a view of this bucket; one that had none on
        any rank has none: its optimizer leaves it alone, as on one device."""
        firsts = self.flat[self.firsts]
        nobody = ([p.grad is None for p in self.parameters] if firsts.is_meta
                  else ((firsts == 0) & firsts.signbit()).tolist())
        for p, slot, unused in zip(self.parameters, self.slots, nobody, strict=True):
            p.grad = None if unused else slot.to(p.dtype)


def buckets_of(parameters: Iterable[nn.Parameter], nbytes: float,
               dtype: torch.dtype | None = None) -> list[Bucket]:
    """`parameters` in reverse order, which is roughly that in which backward computes gradients, in
    buckets that are closed once they hold `nbytes`. Each bucket has one dtype."""
    closed: list[Bucket] = []
    open_: dict[torch.dtype, list[nn.Parameter]] = {}
    for p in reversed(list(parameters)):
        if not p.numel():
            continue
        group = open_.setdefault(p.dtype, [])
        group.append(p)
        if sum(q.numel() for q in group) * (dtype or p.dtype).itemsize >= nbytes:
            closed.append(Bucket(open_.pop(p.dtype), dtype))
    return closed + [Bucket(group, dtype) for group in open_.values()]


class DataParallel(nn.Module):
    """`module` on every rank of `comm`: when `loss.backward()` returns, each parameter's `grad` is
    the average over all ranks.

    That is the gradient of the mean over all samples if the loss is a mean and each rank has
    equally many samples; if not, call `model.backward(loss, samples)` instead of `loss.backward()`.
    Rank 0's parameters and buffers become everyone's at the start, its buffers before each forward.

    strategy: see the module's table. bucket_bytes: how much a bucket holds at least, the last
    one excepted. algorithm: of `all_reduce`. reduce_dtype: in which gradients are sent and added,
    such as torch.bfloat16 for half the bytes; None: their own.
    Memory: the buckets, as large as all gradients; `grad` is a view of them after backward.
    Traffic of a step: an all-reduce of all gradients, 2(p−1)/p·n bytes a rank with a ring.
    Raises `ConfigError` if ranks hold different models.
    """

    def __init__(self, module: nn.Module, comm: Comm, strategy: str = "overlap",
                 bucket_bytes: int = 25 << 20, algorithm: str = "auto",
                 reduce_dtype: torch.dtype | None = None):
        super().__init__()
        if strategy not in STRATEGIES:
            raise ConfigError(f"unknown strategy {strategy!r}; choose one of "
                              f"{', '.join(STRATEGIES)}")
        if not isinstance(bucket_bytes, (int, float)) or not bucket_bytes > 0:
            raise ConfigError(f"bucket_bytes must be a number above 0, not {bucket_bytes!r}")
        check_same_model(module, comm)
        self.module, self.comm, self.algorithm = module, comm, algorithm
        for tensor in (*module.parameters(), *module.buffers()):
            broadcast(comm, tensor.detach(), algorithm="auto")
        self._trained = [p for p in module.parameters() if p.requires_grad]
        together = {"parameter": 1, "flat": float("inf")}.get(strategy, bucket_bytes)
        self.buckets = buckets_of(self._trained, together, reduce_dtype)
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._overlap = strategy == "overlap"
        if self._overlap:
            for p in self._bucket_of:
                p.register_post_accumulate_grad_hook(self._gradient_is_there)
        self._averages = True  # False within no_sync
        self._under_way = False  # has a backward begun that ends with an average?
        self._works: list[Work] = []  # of the buckets that have left, in order
        self._samples: int | None = None  # of this rank since the last average, if anyone counts
        self._total = torch.zeros((), dtype=torch.int64, device=comm.device)  # of all ranks

    # ---- forward and backward ------------------------------------------------------------------

    def forward(self, *args: Any, **options: Any) -> Any:
        """What the module returns. Raises `ConfigError` if its parameters are not those any more
        that it had when it was wrapped."""
        now = [p for p in self.module.parameters() if p.requires_grad]
        if len(now) != len(self._trained) or any(
                a is not b for a, b in zip(now, self._trained, strict=True)):
            raise ConfigError(f"rank {self.comm.rank}: the module's trained parameters are not "
                              f"those that DataParallel wrapped; freeze or replace them before")
        averages = self._averages and torch.is_grad_enabled()
        if averages and self.training:
            self._share_buffers()
        outputs = self.module(*args, **options)
        ends = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
        if averages and ends:
            register_multi_grad_hook(ends, self._backward_begins, mode="any")
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward passes inside don't average: their gradients add up on each rank, until a
        backward outside averages the sums. For accumulation over micro-batches."""
        before, self._averages = self._averages, False
        try:
            yield
        finally:
            self._averages = before

    def backward(self, loss: Tensor | None, samples: int) -> int:
        """Backward of a `loss` that is the mean over this rank's `samples`, which may differ from
        rank to rank: `grad` is the gradient of the mean over all samples of all ranks (within
        `no_sync`, of their sum). Returns how many there were.

        A rank without samples calls `backward(None, 0)`; once all do, the result is 0, and
        gradients stay as they are. Traffic: one all-reduce of 8 bytes more.
        """
        if not isinstance(samples, int) or samples < 0 or (loss is None and samples):
            raise ConfigError(f"rank {self.comm.rank}: samples must be a count of what the loss is "
                              f"the mean of, not {samples!r}")
        if self._samples is None and any(p.grad is not None for p in self._trained):
            raise ConfigError(f"rank {self.comm.rank}: gradients are left from the step before; "
                              f"call zero_grad() before backward(loss, samples)")
        self._samples = (self._samples or 0) + samples
        if not self._averages:
            self._total.fill_(self._samples)
        if loss is None and self._averages and self.training:
            self._share_buffers()
        if loss is not None and samples:
            (loss * samples).backward()
        elif self._averages:
            self._begin()
            self._finish()
        return int(self._total)

    # ---- averaging -----------------------------------------------------------------------------

    def _share_buffers(self) -> None:
        for buffer in self.module.buffers():
            broadcast(self.comm, buffer, algorithm="auto")

    def _backward_begins(self, _gradient: Tensor) -> None:
        if not self._under_way:  # the module may have run several times for one loss
            self._begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _begin(self) -> None:
        self._under_way, self._works = True, []
        for bucket in self.buckets:
            bucket.awaited = set(bucket.parameters)
        if self._samples is not None:
            self._total.fill_(self._samples)
            all_reduce(self.comm, self._total, algorithm="recursive_doubling")

    def _gradient_is_there(self, p: nn.Parameter) -> None:
        """Overlap: every bucket leaves once it is full, in the same order on all ranks."""
        if not self._under_way:
            return
        if p not in self._bucket_of[p].awaited:
            raise ConfigError(f"rank {self.comm.rank}: one backward computed the gradient of a "
                              f"parameter of shape {tuple(p.shape)} twice; use strategy='bucket'")
        self._bucket_of[p].awaited.remove(p)
        while len(self._works) < len(self.buckets) and not self._next.awaited:
            self._leave()

    @property
    def _next(self) -> Bucket:
        return self.buckets[len(self._works)]

    def _leave(self) -> None:
        self._next.fill()
        self._works.append(self.comm.begin(self._reduce, self._next))

    def _reduce(self, comm: Comm, bucket: Bucket) -> None:
        op = "avg" if self._samples is None else "sum"
        all_reduce(comm, bucket.flat, op, algorithm=self.algorithm)

    @torch.no_grad()
    def _finish(self) -> None:
        """Backward is over: average what has not left yet, wait for the rest, hand all out."""
        self._under_way = False
        if self._overlap:
            while len(self._works) < len(self.buckets):
                self._leave()
            for work in self._works:
                work.wait()
        else:
            for bucket in self.buckets:
                bucket.fill()
                self._reduce(self.comm, bucket)
        for bucket in self.buckets:
            if self._samples is not None:
                bucket.flat /= max(int(self._total), 1)
            bucket.hand_out()
        self._samples = None
