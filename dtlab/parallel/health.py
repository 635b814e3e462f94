"""Is the training still sound? Copies that have come to differ, and numbers that are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dtlab.checks import short
from dtlab.collectives import all_gather
from dtlab.collectives.registry import check_comm
from dtlab.comm import Comm
from dtlab.errors import ConfigError, NotFinite, SilentCorruption
from dtlab.parallel.synchronized import DistributedModule, check_distributed


def check_replicas(model: DistributedModule) -> None:
    """Compare all ranks' copies of the parameters by checksums. All ranks call it, say after each
    step. Buffers are not compared: rank 0's become everyone's before the next one.

    Raises `SilentCorruption`, on all ranks: it names the tensor and the ranks whose copies differ
    from those of most (all, if there is no majority: of two ranks nobody can say which is wrong).
    For `DataParallel`, and `zero` of stage 1 and 2. Cost: reading all parameters once, and 8 bytes
    of each to all ranks. A checksum is the sum of a tensor's 64-bit words, which one
    flipped bit always changes; changes that cancel out are missed.
    """
    check_distributed(model, "check_replicas")
    if not getattr(model, "keeps_parameters", False):
        raise ConfigError("check_replicas: the ranks hold different parts of this model; it "
                          "compares the copies of DataParallel and of zero with stage 1 or 2")
    tensors = {name: p.detach() for name, p in model.module.named_parameters()}
    mine = torch.stack([_checksum(x) for x in tensors.values()])
    everyone = all_gather(model.comm, mine.to(model.comm.device)).tolist()
    for name, sums in zip(tensors, zip(*everyone, strict=True), strict=True):
        (most, votes), *others = Counter(sums).most_common()
        if not others:
            continue
        majority = votes > len(sums) / 2
        wrong = [rank for rank, found in enumerate(sums) if not majority or found != most]
        who = " and ".join(f"rank {rank}" for rank in wrong)
        raise SilentCorruption(
            f"the copies of {name!r} differ: that of {who} is not that of the other ranks"
            if majority else f"the copies of {name!r} differ among {who}; which is right can't be "
            f"told", wrong)


def _checksum(x: Tensor) -> Tensor:
    """The sum of its bytes as 64-bit words, without overflow checks."""
    data = x.contiguous().reshape(-1).view(torch.uint8)
    padded = torch.nn.functional.pad(data, (0, -len(data) % 8))
    return padded.view(torch.int64).sum()


@contextmanager
def watch_finite(module: nn.Module, comm: Comm) -> Iterator[None]:
    """Inside, the first NaN or infinity in an output or a gradient of a layer raises `NotFinite`,
    before it reaches other ranks: it names the rank, the step (the forward passes of `module` are
    counted from 0) and the layer. What was not finite on its way in is not that layer's fault.

    Cost: each layer's outputs and gradients are read once more.
    """
    check_comm(comm, "watch_finite(module, comm)")
    if not isinstance(module, nn.Module):
        raise ConfigError(f"watch_finite takes a torch.nn.Module, not {short(module)}")
    step = -1

    def check(what: str, name: str, kind: nn.Module, inputs: Any, outputs: Any) -> None:
        bad = [x for x in _tensors(outputs) if not bool(_finite(x).all())]
        if bad and all(bool(_finite(x).all()) for x in _tensors(inputs)):
            count = int((~_finite(bad[0])).sum())
            raise NotFinite(
                f"rank {comm.rank}{f', step {step}' if step >= 0 else ''}: {what} "
                f"{name or 'the model'!r} ({type(kind).__name__}) has {count} of "
                f"{bad[0].numel()} elements that are NaN or infinite, and is the first of them")

    def check_gradients(what: str, name: str, kind: nn.Module, *of: Any) -> list[Any]:
        return [x.register_hook(lambda gradient: check(what, name, kind, (), gradient))
                for x in _tensors(of) if x.requires_grad]

    def forward_hook(name: str, layer: nn.Module, args: Any, options: Any, outputs: Any) -> None:
        check("the output of", name, layer, (args, options), outputs)
        check_gradients("a gradient of", name, layer, args, options)  # the last layers' come first
        if layer is module:
            check_gradients("the gradient of the output of", name, layer, outputs)

    def begin(_: nn.Module, *inputs: Any) -> None:
        nonlocal step
        step += 1
        check("an input of", "", module, (), inputs)

    handles: list[Any] = [module.register_forward_pre_hook(begin, with_kwargs=True)]
    for name, layer in module.named_modules():
        handles.append(layer.register_forward_hook(
            lambda *what, name=name: forward_hook(name, *what), with_kwargs=True))
        for of, p in layer.named_parameters(recurse=False):
            handles += check_gradients("the gradient of", f"{name}.{of}" if name else of, layer, p)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _finite(x: Tensor) -> Tensor:
    """Do as torch.isfinite, which takes no numbers of eight bits."""
    return torch.isfinite(x.float() if x.itemsize == 1 else x)


def _tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(x)
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())]
