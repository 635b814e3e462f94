"""Batch normalization over the samples of all ranks, as if one device had the whole batch.

With data parallelism, each rank's BatchNorm knows its own samples only: the fewer they are, the
noisier is their mean, and the more the model differs from that of one device. Here two sums travel
forward, and their gradients backward. Source: Ioffe & Szegedy 2015; torch.nn.SyncBatchNorm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dtlab.collectives.registry import check_comm
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.parallel.conversions import copy_to, reduce_from


def sync_batch_norm(module: nn.Module, comm: Comm) -> nn.Module:
    """In place: each BatchNorm1d, 2d and 3d of `module` normalizes over the samples of all ranks of
    `comm`; returns it. Parameters, buffers and their names stay. Wrap it in `DataParallel`, then.

    Outputs, gradients and running statistics are those of one device with all samples, of which
    ranks may have different numbers. All ranks run forward and backward equally often; one without
    samples runs them on a batch of 0. Evaluation with running statistics moves nothing, and equals
    torch's; without them it normalizes over all ranks, as training does.
    Cost of a layer with c channels: all-reduces of c + 1 and c numbers forward, of the same numbers
    backward. Raises `ConfigError` for other kinds of batch normalization.
    """
    check_comm(comm, "sync_batch_norm(module, comm)")
    if not isinstance(module, nn.Module):
        raise ConfigError(f"sync_batch_norm takes a torch.nn.Module, not {module!r}")
    norms: list[Any] = [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]
    for norm in norms:
        if type(norm) not in SYNCHRONIZED:
            raise ConfigError(f"sync_batch_norm takes BatchNorm1d, BatchNorm2d and BatchNorm3d, "
                              f"not {type(norm).__name__}")
    for norm in norms:  # the same object, so that its parameters, names and hooks stay
        norm.__class__, norm.comm = SYNCHRONIZED[type(norm)], comm
    return module


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm over all ranks of `comm`: see `sync_batch_norm`."""

    comm: Comm
    running_mean: Any
    running_var: Any
    num_batches_tracked: Any

    @torch._disable_dynamo  # it would trace how messages are sent
    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(x)
        self._check_input_dim(x)
        if x.shape[1] != self.num_features:
            raise ConfigError(f"rank {self.comm.rank}: batch normalization of {self.num_features} "
                              f"channels got {x.shape[1]}")
        rows = x.to(torch.promote_types(x.dtype, torch.float32)).transpose(1, -1)  # (…, c)
        own = rows.new_tensor([x.numel() / self.num_features])
        sums = self.total(torch.cat([rows.flatten(0, -2).sum(0), own]))
        n = sums[-1].detach()
        if not n.is_meta and n < 2:
            raise ConfigError(f"batch normalization in training needs more than one value of a "
                              f"channel over all ranks, but they have {int(n)}")
        mean = sums[:-1] / n
        centred = rows - mean
        variance = self.total(centred.square().flatten(0, -2).sum(0)) / n
        if self.training and self.track_running_stats and self.running_mean is not None:
            self.track(mean.detach(), variance.detach() * n / (n - 1))
        y = centred * (variance + self.eps).rsqrt()
        if self.affine:
            y = y * self.weight + self.bias
        return y.transpose(1, -1).to(x.dtype)

    def total(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, which each uses for its own samples: gradients add up."""
        return copy_to(self.comm, reduce_from(self.comm, x))

    @torch.no_grad()
    def track(self, mean: Tensor, variance: Tensor) -> None:
        """Mix them into the running statistics, of which variances are unbiased."""
        self.num_batches_tracked += 1
        share = 1 / self.num_batches_tracked.double() if self.momentum is None else self.momentum
        for running, now in ((self.running_mean, mean), (self.running_var, variance)):
            running.copy_((1 - share) * running + share * now)


SYNCHRONIZED = {kind: type(f"Sync{kind.__name__}", (SyncBatchNorm, kind), {})
                for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)}
