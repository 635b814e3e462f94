"""The mean over a pipeline's batch, however its targets are cut."""

from __future__ import annotations

from typing import Any

import torch

from dtlab.checks import short
from dtlab.errors import ConfigError


def counted(targets: Any) -> int:
    """The number of targets that a mean loss counts: whole numbers other than −100, torch's
    `ignore_index`; else all elements."""
    y = torch.as_tensor(targets)
    if y.is_meta or y.is_floating_point() or y.is_complex():
        return y.numel()
    return int((y.long() != -100).sum())  # a byte of 156 is no -100


def check_mean(loss_fn: Any, targets: Any) -> None:
    """Raise `ConfigError` if one of torch's losses, or a partial of one, says that it is not the
    mean over what is `counted`."""
    if not callable(loss_fn):
        raise ConfigError(f"loss_fn is a function of an output and its targets, not "
                          f"{short(loss_fn)}")

    def option(name: str, default: Any) -> Any:
        return getattr(loss_fn, name, getattr(loss_fn, "keywords", {}).get(name, default))

    by_class = option("weight", None) is not None and not torch.as_tensor(
        targets).is_floating_point()  # else it is by element, of a mean over all
    if option("reduction", "mean") == "sum" or option("ignore_index", -100) != -100 or by_class:
        raise ConfigError("loss_fn must be the mean over targets, −100 left out: without "
                          "reduction=\"sum\", another ignore_index, or weights of classes")
