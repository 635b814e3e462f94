"""A batch, cut into micro-batches, and the mean over it, however its targets are cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dtlab.checks import short
from dtlab.errors import ConfigError


def as_tensor(what: str, x: Any) -> Tensor:
    """Return `x` as one tensor. Raises `ConfigError`, which calls it `what`, if it isn't one."""
    try:
        return x if isinstance(x, Tensor) else torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"a pipeline's {what} are one tensor, cut along its first dimension, not "
                          f"{short(x)}") from None


def micro_batches(x: Tensor | None, m: int) -> Sequence[Tensor | None]:
    """The parts of `x`, which lie in its memory. One that is changed in place, as a first layer may
    do, is no change of the others for autograd."""
    if x is None or x.requires_grad:
        return [None] * m if x is None else x.chunk(m)
    if x.is_inference():  # of which torch doesn't count the changes
        with torch.inference_mode(False):
            x = x.clone()
    return [part.data for part in x.chunk(m)]


@contextmanager
def unchanged(extras: Iterable[Tensor | None], stage: str) -> Iterator[None]:
    """Raise `ConfigError` if extras are changed in place: stages on other ranks have their own."""
    versions = [x._version for x in extras if x is not None]
    yield
    if versions != [x._version for x in extras if x is not None]:
        raise ConfigError(f"{stage} changes an extra in place, which each stage gets as it was "
                          f"given; let it change a copy, x.clone()")


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
        raise ConfigError(f"loss_fn is a function of outputs and targets, not {short(loss_fn)}")

    def option(name: str, default: Any) -> Any:
        return getattr(loss_fn, name, getattr(loss_fn, "keywords", {}).get(name, default))

    by_class = option("weight", None) is not None and not targets.is_floating_point()
    # else it is by element, of a mean over all
    if option("reduction", "mean") == "sum" or option("ignore_index", -100) != -100 or by_class:
        raise ConfigError("loss_fn must be the mean over targets, −100 left out: without "
                          "reduction=\"sum\", another ignore_index, or weights of classes")
