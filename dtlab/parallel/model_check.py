"""Checks of a module, and of a batch, that ranks are to train together."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel

from dtlab.checks import short
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.reduction import overlaps_itself, span_bytes


def check_model(module: nn.Module, comm: Comm) -> None:
    """Raise `ConfigError`, on all ranks, unless all ranks' modules have the same parameters and
    buffers: equal names, shapes, dtypes, and the same ones frozen. Values may differ. Layers that
    have no sizes yet, or that change other weights on each rank, are refused, too."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"rank {comm.rank}: need a torch.nn.Module, not {module!r}")
    for name, layer in module.named_modules():
        if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():  # type: ignore[misc]
            raise ConfigError(f"{name or 'the module'!r}, a {type(layer).__name__}, has no sizes "
                              f"yet; call the module once before wrapping it")
        if isinstance(layer, DistributedDataParallel):
            raise ConfigError(f"{name or 'the module'!r} is in torch's DistributedDataParallel, "
                              f"which takes the gradients itself; wrap the module in one of both")
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
            raise ConfigError(f"{name or 'the module'!r} shrinks the rows that it looks up "
                              f"(max_norm={layer.max_norm}), which are others on each rank; leave "
                              f"max_norm out, and shrink rows after optimizer.step()")
    check_whole_batch(module)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, x in tensors:
        if not x.is_contiguous() and overlaps_itself(x):
            raise ConfigError(f"elements of {name!r} share memory, as an expanded tensor's do; "
                              f"give the module a copy (x.contiguous()) before wrapping it")
    mine = {name: f"has shape {tuple(p.shape)} and dtype {p.dtype}, and is "
                  f"{'trained' if p.requires_grad else 'frozen'}"
            for name, p in tensors}
    check_same(comm, "ranks hold different models", mine)


def check_same(comm: Comm, problem: str, mine: Mapping[str, str]) -> None:
    """Raise `ConfigError`, on all ranks, unless all ranks say the same of the same names, in the
    same order. problem: how its sentence begins."""
    first, *others = comm._all_gather_objects(mine)
    for rank, theirs in enumerate(others, 1):
        for name in [*first, *theirs]:
            here, there = first.get(name, "is missing"), theirs.get(name, "is missing")
            if here != there:
                raise ConfigError(f"{problem}: {name!r} {here} on rank 0, but {there} on rank "
                                  f"{rank}")
        if list(theirs) != list(first):
            raise ConfigError(f"{problem}: rank {rank} has its parameters in another order than "
                              f"rank 0")


def check_outermost() -> None:
    """Raise `ConfigError` in a forward of torch's DistributedDataParallel around the wrapper."""
    if DistributedDataParallel._active_ddp_module is not None:
        raise ConfigError("torch's DistributedDataParallel is around the wrapped module, and takes "
                          "the gradients itself; wrap the module in one of both")


def check_dtype(dtype: object, parameters: Iterable[Tensor]) -> None:
    """Raise `ConfigError` unless `dtype`, if not None, can take the place of the parameters' own:
    it has fractions, and imaginary parts just where they have."""
    for p in parameters if dtype is not None else ():
        if (not isinstance(dtype, torch.dtype) or p.is_complex() != dtype.is_complex
                or not (dtype.is_complex or dtype.is_floating_point) or dtype.itemsize < 2):
            raise ConfigError(f"param_dtype and reduce_dtype are of the parameters' kind, such as "
                              f"{'torch.complex64' if p.is_complex() else 'torch.bfloat16'} for "
                              f"{p.dtype}, not {short(dtype)}")


def check_own_memory(module: nn.Module) -> None:
    """Raise `ConfigError` if a trained parameter lies in the memory of another parameter or buffer,
    as after `a.weight.data = b.weight.data`: where ZeRO puts it, they would be two."""
    last, last_end, last_is_trained = "", 0, False
    for start, end, name, is_trained in sorted(
            (x.data_ptr(), x.data_ptr() + span_bytes(x), name, x.requires_grad)
            for name, x in (*module.named_parameters(), *module.named_buffers())
            if x.numel() and not x.is_meta):
        if start < last_end and (is_trained or last_is_trained):
            raise ConfigError(f"{last!r} and {name!r} lie in the same memory, which ZeRO would "
                              f"part; let both names be one nn.Parameter, or clone one")
        if end > last_end:
            last, last_end, last_is_trained = name, end, is_trained


def check_not_compiled(module: nn.Module) -> None:
    """Raise `ConfigError` if a part of it is compiled."""
    for name, part in module.named_modules():
        if is_compiled(part):
            raise ConfigError(f"torch.compile traces the parameters of {name or 'the module'!r}, "
                              f"which ZeRO 3 has only while it runs; use stage 1 or 2, or don't "
                              f"compile it")


def is_compiled(module: nn.Module) -> bool:
    """Is it compiled, by torch.compile, which makes a module of its own, or by its `compile`?"""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def check_same_batch(comm: Comm, *batch: Tensor | None) -> None:
    """Raise `ConfigError`, on all ranks, if one has another batch than rank 0, by a checksum."""
    mine = [(x.shape, 0 if x.is_meta else _checksum(x)) for x in batch if x is not None]
    for rank, theirs in enumerate(found := comm._all_gather_objects(mine)):
        if theirs != found[0]:
            raise ConfigError(f"rank {rank} has another batch than rank 0; give all ranks the "
                              f"same, of which each takes its part")


def _checksum(x: Tensor) -> int:
    values = x.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
    return zlib.crc32(values.view(torch.uint8).numpy().data)


def check_whole_batch(module: nn.Module) -> None:
    """Raise `ConfigError` for embeddings whose gradients depend on how often a token occurs in the
    whole batch, of which a rank or a micro-batch sees a part."""
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.scale_grad_by_freq:
            raise ConfigError(f"{name or 'the module'!r} divides gradients by how often a token "
                              f"occurs in the batch (scale_grad_by_freq), but sees only a part of "
                              f"the batch here; leave scale_grad_by_freq out")
