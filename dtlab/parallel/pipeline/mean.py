"""The mean over a pipeline's batch, however its targets are cut."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dtlab.checks import short
from dtlab.errors import ConfigError


def counted(targets: Tensor) -> int:
    """The number of targets that a mean loss counts: whole numbers other than −100, torch's
    `ignore_index`; else all elements."""
    if targets.is_meta or targets.is_floating_point() or targets.is_complex():
        return targets.numel()
    return int((targets.long() != -100).sum())  # a byte of 156 is no -100


def check_mean(loss_fn: Any, targets: Tensor) -> None:
    """Raise `ConfigError` if one of torch's losses, or a partial of one, says that it is not the
    mean over what is `counted`."""
    if not callable(loss_fn):
        raise ConfigError(f"loss_fn is a function of an output and its targets, not "
                          f"{short(loss_fn)}")

    def option(name: str, default: Any) -> Any:
        return getattr(loss_fn, name, getattr(loss_fn, "keywords", {}).get(name, default))

    by_class = option("weight", None) is not None and not targets.is_floating_point()
    # else it is by element, of a mean over all
    if option("reduction", "mean") == "sum" or option("ignore_index", -100) != -100 or by_class:
        raise ConfigError("loss_fn must be the mean over targets, −100 left out: without "
                          "reduction=\"sum\", another ignore_index, or weights of classes")
