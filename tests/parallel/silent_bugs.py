"""Ten bugs of tensor parallelism, each from a public issue: code that runs, a loss that falls, and
gradients that are wrong. Seven are silent: the first loss is right. Each is a small model with the
bug, and mended."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, layer_norm

import dtlab
from dtlab.collectives import all_reduce
from dtlab.models.dropout import counter_dropout
from dtlab.parallel.conversions import (
    copy_to,
    gather_from,
    gather_invariant,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from dtlab.parallel.tensor import vocab_cross_entropy
from dtlab.parallel.types import VARYING, declare

B, S, H, WIDE, CLASSES = 2, 4, 6, 12, 12
Loss = Callable[[dtlab.Comm, SimpleNamespace, bool], Tensor]


class Bug(NamedTuple):
    """says: what the checker says of it. silent: is the first loss that of one device?"""

    loss: Loss
    link: str
    says: str
    silent: bool
    clip: Callable[[dtlab.Comm, SimpleNamespace, bool], None] | None = None


BUGS: dict[str, Bug] = {}


def bug(link: str, says: str, silent: bool = True, **more: Any) -> Callable[[Loss], Loss]:
    def register(loss: Loss) -> Loss:
        BUGS[loss.__name__] = Bug(loss, f"https://github.com/{link}", says, silent, **more)
        return loss

    return register


def parts(comm: dtlab.Comm, device: str = "cpu") -> SimpleNamespace:
    """This rank's parameters of x → x·e → norm → up → gelu → down, in float64, and a batch."""
    random = torch.Generator().manual_seed(1)
    cut = {"up": 0, "down": 1, "output": 0}
    p = SimpleNamespace()
    for name, shape in {"e": (H,), "norm": (2, H), "up": (WIDE, H), "scale": (WIDE // 4,),
                        "kv": (1, H), "down": (H, WIDE), "output": (CLASSES, H)}.items():
        whole = 0.3 * torch.randn(shape, generator=random, dtype=torch.float64)
        whole += 1 if name in ("e", "norm", "scale") else 0
        mine = whole.chunk(comm.size, cut[name])[comm.rank] if name in cut else whole
        parameter = nn.Parameter(mine.clone().to(device))
        if name in cut:
            declare(parameter, comm, VARYING)
        setattr(p, name, parameter)
    p.x = torch.randn(B, S, H, generator=random, dtype=torch.float64).to(device)
    p.y = torch.randn(B, S, H, generator=random, dtype=torch.float64).to(device)
    p.classes = torch.randint(CLASSES, (B, S), generator=random).to(device)
    return p


def parameters(p: SimpleNamespace) -> list[nn.Parameter]:
    return [value for value in vars(p).values() if isinstance(value, nn.Parameter)]


def normed(x: Tensor, norm: Tensor) -> Tensor:
    weight, bias = norm
    return layer_norm(x, (H,), weight, bias)


def mse(p: SimpleNamespace, out: Tensor) -> Tensor:
    return (out - p.y).square().mean()


# ---- the ten -------------------------------------------------------------------------------------


@bug("pytorch/pytorch/issues/157606", r"linear|matmul mixes h, .*Invariant.* copy_to\(comm, h\)")
def the_last_all_reduce_of_backward_is_missing(
        comm: dtlab.Comm, p: SimpleNamespace, mended: bool) -> Tensor:
    h = normed(p.x * p.e, p.norm)
    if mended:
        h = copy_to(comm, h)
    wide = gelu(h @ p.up.T)
    return mse(p, reduce_from(comm, wide @ p.down.T))


@bug("pytorch/pytorch/issues/160285", "the loss is Replicated.* p times too large")
def gradients_are_doubled(comm: dtlab.Comm, p: SimpleNamespace, mended: bool) -> Tensor:
    h = copy_to(comm, normed(p.x * p.e, p.norm))
    wide = gelu(h @ p.up.T)
    out = reduce_from(comm, wide @ p.down.T)
    if not mended:  # as torch.distributed.nn.all_reduce: right if the ranks' losses add up
        out = copy_to(comm, out)
    return mse(p, out)


@bug("NVIDIA/Megatron-LM/issues/1446", r"layer_norm mixes weight|norm.*copy_to")
def norms_of_sequence_parallel_ranks_drift_apart(
        comm: dtlab.Comm, p: SimpleNamespace, mended: bool) -> Tensor:
    x = scatter_to(comm, p.x * p.e)
    h = gather_from(comm, normed(x, copy_to(comm, p.norm) if mended else p.norm))
    wide = gelu(h @ p.up.T)
    out = x + reduce_scatter_to(comm, wide @ p.down.T)
    return mse(p, gather_invariant(comm, out))


@bug("NVIDIA/Megatron-LM/issues/7452", r"mul mixes p\.scale|scale.*copy_to")
def a_weight_shared_by_all_heads_is_not_reduced(
        comm: dtlab.Comm, p: SimpleNamespace, mended: bool) -> Tensor:
    h = copy_to(comm, normed(p.x * p.e, p.norm))
    heads = (h @ p.up.T).unflatten(-1, (-1, len(p.scale)))
    scale = copy_to(comm, p.scale) if mended else p.scale
    wide = gelu(heads * scale).flatten(-2)
    return mse(p, reduce_from(comm, wide @ p.down.T))


@bug("bigcode-project/Megatron-LM/issues/35", "mixes .*Invariant.* Replicated.* copy_to")
def copies_of_the_one_key_value_head_drift_apart(
        comm: dtlab.Comm, p: SimpleNamespace, mended: bool) -> Tensor:
    h = copy_to(comm, normed(p.x * p.e, p.norm))
    kv = copy_to(comm, p.kv) if mended else p.kv
    wide = gelu(h @ p.up.T) * (h @ kv.T)
    return mse(p, reduce_from(comm, wide @ p.down.T))


@bug("pytorch/pytorch/issues/153016", r"matmul mixes h, .*Invariant.* copy_to")
def a_gather_keeps_only_its_own_part_of_the_gradient(
        comm: dtlab.Comm, p: SimpleNamespace, mended: bool) -> Tensor:
    x = scatter_to(comm, p.x * p.e)
    h = gather_from(comm, x) if mended else gather_invariant(comm, x)
    wide = gelu(h @ p.up.T)
    return mse(p, gather_invariant(comm, reduce_scatter_to(comm, wide @ p.down.T)))


@bug("NVIDIA/Megatron-LM/issues/7452", "reduce_from takes what is Partial, but .* Replicated",
     silent=False)
def the_loss_of_logits_that_are_whole_counts_them_t_times(
        comm: dtlab.Comm, p: SimpleNamespace, mended: bool) -> Tensor:
    h = copy_to(comm, p.x * p.e)
    logits = h @ p.output.T
    if mended:
        return vocab_cross_entropy(comm, logits, p.classes)
    logits = gather_from(comm, logits, dim=-1)
    exponentials = reduce_from(comm, logits.exp().sum(-1))  # whole on each rank
    own = logits.gather(-1, p.classes.unsqueeze(-1)).squeeze(-1)
    return (exponentials.log() - own).mean()


@bug("NVIDIA/Megatron-LM/issues/737", "sub|add mixes .*Invariant.* Varying", silent=False)
def label_smoothing_takes_the_mean_of_its_own_classes(
        comm: dtlab.Comm, p: SimpleNamespace, mended: bool) -> Tensor:
    logits = copy_to(comm, p.x * p.e) @ p.output.T
    loss = vocab_cross_entropy(comm, logits, p.classes, "none")
    summed = reduce_from(comm, logits.exp().sum(-1)).log()
    mean = logits.sum(-1)
    mean = reduce_from(comm, mean) / CLASSES if mended else mean / logits.shape[-1]
    return (0.8 * loss + 0.2 * (summed - mean)).mean()


@bug("tenstorrent/tt-metal/issues/55947", "dropout mixes .*Invariant.* random numbers",
     silent=False)
def each_rank_drops_other_elements(comm: dtlab.Comm, p: SimpleNamespace, mended: bool) -> Tensor:
    h = normed(p.x * p.e, p.norm)
    seeds = torch.arange(B, device=h.device)
    h = counter_dropout(h, 0.25, seeds, 0) if mended else dropout(h, 0.25)
    wide = gelu(copy_to(comm, h) @ p.up.T)
    return mse(p, reduce_from(comm, wide @ p.down.T))


def clipped(comm: dtlab.Comm, p: SimpleNamespace, mended: bool) -> None:
    """In place: the gradients' norm is at most 0.1."""
    squares = {q: q.grad.square().sum() for q in parameters(p) if q.grad is not None}
    cut = sum(s for q, s in squares.items() if q is p.up or q is p.down or q is p.output)
    if mended:
        all_reduce(comm, cut)
    whole = sum(s for q, s in squares.items()
                if not (q is p.up or q is p.down or q is p.output))
    factor = (0.1 / (cut + whole).sqrt()).clamp(max=1)
    for q in squares:
        gradient = q.grad
        gradient.mul_(factor)


@bug("NVIDIA/Megatron-LM/pull/5916", "mul makes gradient, which is the same on all ranks, Varying",
     clip=clipped)
def each_rank_clips_by_the_norm_of_its_own_part(
        comm: dtlab.Comm, p: SimpleNamespace, mended: bool) -> Tensor:
    return the_last_all_reduce_of_backward_is_missing(comm, p, mended=True)


# ---- running them --------------------------------------------------------------------------------


def gradients(comm: dtlab.Comm, name: str, mended: bool, steps: int = 1
              ) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of `steps` steps of SGD, and the last gradients, those of cut parameters whole."""
    found = BUGS[name]
    p = parts(comm)
    losses = []
    for _ in range(steps):
        for q in parameters(p):
            q.grad = None
        loss = found.loss(comm, p, mended)
        loss.backward()
        if found.clip:
            found.clip(comm, p, mended)
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for q in parameters(p):
                if q.grad is not None:
                    q -= 0.1 * q.grad
    return losses, {key: q.grad for key, q in vars(p).items()
                    if isinstance(q, nn.Parameter) and q.grad is not None}


def checked(comm: dtlab.Comm, name: str, mended: bool) -> None:
    """The same on tensors without data, by the checker."""

    def step(comm: dtlab.Comm) -> Tensor | None:
        p = parts(comm, device="meta")
        loss = BUGS[name].loss(comm, p, mended)
        clip = BUGS[name].clip
        if clip is None:
            return loss
        loss.backward()
        clip(comm, p, mended)
        return None

    dtlab.parallel.types.check(step, comm)
