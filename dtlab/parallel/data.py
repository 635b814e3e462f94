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

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from dtlab.checks import check_choice
from dtlab.collectives import all_reduce
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.parallel.memory import mark
from dtlab.parallel.synchronized import SteppedPart, SynchronizedModule

STRATEGIES = ("parameter", "flat", "bucket", "overlap")


class Bucket:
    """Parameters of one dtype whose gradients travel as one vector, with a count for each: of the
    ranks that have a gradient of it."""

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None):
        self.parameters = parameters
        sizes = [p.numel() for p in parameters]
        self.flat = torch.empty(sum(sizes) + len(sizes), dtype=dtype or parameters[0].dtype,
                                device=parameters[0].device)
        mark(self.flat, "gradients")
        *slots, self.counts = self.flat.split([*sizes, len(sizes)])
        self.slots = [slot.view(p.shape) for slot, p in zip(slots, parameters, strict=True)]
        self.awaited = set(parameters)  # those whose gradient this backward has not computed yet

    def fill(self) -> None:
        """Move the gradients in: 0 for a parameter without one."""
        self.had = [p.grad is not None for p in self.parameters]
        self.counts.copy_(torch.tensor(self.had, device="cpu"))
        for p, slot in zip(self.parameters, self.slots, strict=True):
            if p.grad is None:
                slot.zero_()
                continue
            if p.grad.is_sparse:
                raise ConfigError("DataParallel needs dense gradients; make embeddings with "
                                  "sparse=False")
            if p.grad.data_ptr() != slot.data_ptr() or p.grad.dtype != slot.dtype:
                slot.copy_(p.grad)
            p.grad = None

    def assign_gradients(self) -> None:
        """Each parameter gets its averaged gradient, a view of this bucket; one that had none on
        any rank has none: its optimizer leaves it alone, as on one device. One that isn't
        contiguous gets a copy with its own strides, which fused optimizers take for granted."""
        anybody = self.had if self.flat.is_meta else (self.counts.real > 0).tolist()
        for p, slot, used in zip(self.parameters, self.slots, anybody, strict=True):
            if not used:
                p.grad = None
            elif p.is_contiguous():
                p.grad = slot.to(p.dtype)
            else:
                p.grad = torch.empty_like(p).copy_(slot)


def buckets_of(parameters: Iterable[nn.Parameter], nbytes: float,
               dtype: torch.dtype | None = None) -> list[Bucket]:
    """Return `parameters` in reverse order, which is roughly that in which backward computes
    gradients, in buckets that are closed once they hold `nbytes`. Each bucket has one dtype."""
    closed: list[Bucket] = []
    open_: dict[torch.dtype, list[nn.Parameter]] = {}
    for p in reversed(list(parameters)):
        if not p.numel():
            continue
        group = open_.setdefault(p.dtype, [])
        group.append(p)
        if sum(q.numel() + 1 for q in group) * (dtype or p.dtype).itemsize >= nbytes:
            closed.append(Bucket(open_.pop(p.dtype), dtype))
    return closed + [Bucket(group, dtype) for group in open_.values()]


class DataParallel(SynchronizedModule):
    """`module` on every rank of `comm`: when `loss.backward()` returns, each parameter's `grad` is
    the average over all ranks.

    That is the gradient of the mean over all samples if the loss is a mean and each rank has
    equally many samples; if not, call `model.backward(loss, samples)` instead of `loss.backward()`.
    Rank 0's parameters and buffers become everyone's at the start, its buffers before each step's
    first forward.

    strategy: see the module's table. bucket_bytes: how much a bucket holds at least, the last
    one excepted. algorithm: of `all_reduce`. reduce_dtype: in which gradients are sent and added,
    such as torch.bfloat16 for half the bytes; None: their own.
    Memory: the buckets, as large as all gradients, which are views of them after backward: clone
    a gradient to keep it, for the next backward overwrites it. Parameters that aren't contiguous,
    as in channels_last, have gradients of their own beside. What torch.autograd.grad computes is
    reduced by `model.reduce()`, once it is assigned to `grad`.
    Traffic of a step: an all-reduce of all gradients and of a number for each parameter,
    2(p−1)/p·n bytes a rank with a ring.
    Raises `ConfigError` if ranks hold different models.
    """

    def __init__(self, module: nn.Module, comm: Comm, strategy: str = "overlap",
                 bucket_bytes: float = 25 << 20, algorithm: str = "auto",
                 reduce_dtype: torch.dtype | None = None):
        check_choice("strategy", strategy, STRATEGIES)
        if not isinstance(bucket_bytes, (int, float)) or not bucket_bytes > 0:
            raise ConfigError(f"bucket_bytes must be a number above 0, not {bucket_bytes!r}")
        super().__init__(module, comm, algorithm, reduce_dtype)
        together = {"parameter": 1, "flat": float("inf")}.get(strategy, bucket_bytes)
        self.buckets = buckets_of(self.trained, together, reduce_dtype)
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._overlap = strategy == "overlap"

    def held(self) -> Iterable[torch.Tensor]:
        return [bucket.flat for bucket in self.buckets]

    def named_gradients(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, p.grad) for p, name in self.names.items() if p.grad is not None]

    def set_zero_gradient(self, p: nn.Parameter) -> None:
        p.grad = torch.zeros_like(p)

    def stepped_parts(self) -> list[SteppedPart]:
        return [SteppedPart(name, p.shape, p, [(0, 0, p.numel())])
                for p, name in self.names.items() if p.numel()]

    def begin_reduction(self) -> None:
        self._launched = []
        for bucket in self.buckets:
            bucket.awaited = set(bucket.parameters)

    def gradient_ready(self, p: nn.Parameter) -> None:
        """Overlap: a bucket leaves once it is full, and all before it have left."""
        self._bucket_of[p].awaited.discard(p)
        for bucket in self.buckets[len(self._launched) :] if self._overlap else ():
            if bucket.awaited:
                break
            self._launch_reduction()

    def _launch_reduction(self) -> None:
        """The next bucket leaves: its reduction goes on beside backward."""
        bucket = self.buckets[len(self._launched)]
        bucket.fill()
        self._launched.append(self.comm.begin(self._reduce, bucket))

    def _reduce(self, comm: Comm, bucket: Bucket) -> None:
        self.mean(bucket.flat, lambda x: all_reduce(comm, x, algorithm=self.algorithm))

    def finish_reduction(self) -> None:
        while self._overlap and len(self._launched) < len(self.buckets):  # some have no gradient
            self._launch_reduction()
        for number, bucket in enumerate(self.buckets):
            if not self._overlap:
                bucket.fill()
                self._reduce(self.comm, bucket)
            else:
                self._launched[number].wait()
                self._reduce_late(bucket)
            bucket.assign_gradients()

    def _reduce_late(self, bucket: Bucket) -> None:
        """Add what came after the bucket had left: a layer that reentrant checkpointing runs twice
        has two gradients in one backward."""
        if any(p.grad is not None for p in bucket.parameters):
            early = bucket.flat.clone()
            bucket.fill()
            self._reduce(self.comm, bucket)
            bucket.flat += early
