"""Tensor parallelism: the matrices of a layer, cut over t ranks.

A column-parallel linear layer cuts its outputs, a row-parallel one its inputs. In a pair, what lies
between them is never whole anywhere; one all-reduce forward (reduce_from, Megatron's g) and one
backward (copy_to, f) make it equal to one device.

Shapes: b samples, s positions, h hidden, a heads, k key-value heads, v vocabulary, t ranks.
Source: Shoeybi et al. 2019 (Megatron-LM). Chapter: 11.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from dtlab.checks import short
from dtlab.collectives import all_gather, all_reduce, broadcast
from dtlab.collectives.registry import check_comm
from dtlab.comm import Comm
from dtlab.errors import ConfigError, ShapeMismatch
from dtlab.models import GPT
from dtlab.models.gpt import Attention, draw_seeds
from dtlab.parallel.conversions import copy_to, gather_from, reduce_from, reduce_scatter_to
from dtlab.parallel.model_check import check_same
from dtlab.parallel.sequence import cut_positions, gather_linear
from dtlab.parallel.sharded import ShardedModule, check_sequence, share
from dtlab.parallel.types import INVARIANT, VARYING


class ColumnLinear(ShardedModule):
    """x (…, in) → (…, out/t): this rank's outputs of the linear layer x Wᵀ + b, of which it holds
    the rows weight (out/t, in) and bias (out/t).

    Its values are those that nn.Linear(in, out) draws from torch's generator, which must be in the
    same state on all ranks, or those of `like`, with or without bias as that is. Outputs that t
    doesn't divide are cut unevenly.
    sequence: x holds this rank's positions, (b, s/t, in), which are gathered: see
    `dtlab.parallel.sequence`; "regather" keeps only these for backward.
    Cost: forward nothing, backward an all-reduce of x; with `sequence` an all-gather of the whole x
    forward, a reduce-scatter backward ("regather": and an all-gather).
    """

    def __init__(self, comm: Comm, in_features: int, out_features: int, bias: bool = True, *,
                 sequence: bool | str = False, like: nn.Linear | None = None):
        super().__init__(comm, sequence)
        whole = checked_like(like or nn.Linear(in_features, out_features, bias), nn.Linear,
                             out_features, in_features)
        cut = [share(out_features, comm)]
        self.keep("weight", "weight", whole.weight, 0, cut)
        self.keep("bias", "bias", whole.bias, 0, cut)

    def forward(self, x: Tensor) -> Tensor:
        return enter_linear(self.comm, x, self.weight, self.bias, self.sequence)


class RowLinear(ShardedModule):
    """x (…, in/t) → (…, out): the linear layer x Wᵀ + b of whose inputs each rank has a part, and
    of the weight (out, in/t) the columns that belong to them. The bias (out) is added once.

    Initial values as in `ColumnLinear`. sequence: the output is this rank's positions, (b, s/t,
    out). Cost: forward an all-reduce of the output, with `sequence` a reduce-scatter; backward
    nothing, with `sequence` an all-gather.
    """

    def __init__(self, comm: Comm, in_features: int, out_features: int, bias: bool = True, *,
                 sequence: bool | str = False, like: nn.Linear | None = None):
        super().__init__(comm, sequence)
        whole = checked_like(like or nn.Linear(in_features, out_features, bias), nn.Linear,
                             out_features, in_features)
        self.keep("weight", "weight", whole.weight, 1, [share(in_features, comm)])
        self.bias = copy.deepcopy(whole.bias)  # `like` may train on

    def forward(self, x: Tensor) -> Tensor:
        check_input(x, self.weight)
        y = leave(self.comm, linear(x, self.weight), self.sequence)
        if self.bias is None:
            return y
        bias = copy_to(self.comm, self.bias) if self.sequence else self.bias
        return y + bias.to(y.dtype)  # the same, but within torch.autocast


class QKVLinear(ShardedModule):
    """The fused projection to queries, keys and values of `attention`, cut by heads: x (b, s, h) →
    (b, s, (a/t + 2·k/t)·d), this rank's queries, then its keys, then its values.

    With fewer key-value heads than ranks, t/k ranks hold copies of one head; `copy_to` among them
    adds up its gradient. Without that the copies drift apart, and the loss explodes thousands of
    steps later (bigcode-project/Megatron-LM#35). Raises `ConfigError` unless t divides a, and one
    of t and k the other.
    """

    q_weight: Tensor  # these four if heads are copied, else weight and bias
    q_bias: Tensor
    kv_weight: Tensor
    kv_bias: Tensor

    def __init__(self, comm: Comm, attention: Attention, sequence: bool | str = False):
        super().__init__(comm, sequence)
        a, k, d, t = attention.heads, attention.kv_heads, attention.head_dim, comm.size
        if a % t or (k % t and t % k):
            raise ConfigError(f"{t} ranks can't share {a} heads and {k} key-value heads: the ranks "
                              f"must divide the heads, and divide or be divided by the key-value "
                              f"heads")
        copies = max(t // k, 1)  # ranks that hold the same key-value head
        first = comm.rank // copies * copies
        self.copies = (None if copies == 1 else comm if copies == t
                       else comm.subgroup(range(first, first + copies)))
        queries = [scaled(share(a, comm), d)]
        mine = range(first // copies, first // copies + 1) if copies > 1 else share(k, comm)
        keys, values = (scaled(range(start + mine.start, start + mine.stop), d)
                        for start in (a, a + k))
        for name, whole in attention.qkv.named_parameters():
            if self.copies is None:
                self.keep(name, name, whole, 0, [*queries, keys, values])
                continue
            self.keep(f"q_{name}", name, whole, 0, queries)
            self.keep(f"kv_{name}", name, whole, 0, [keys, values], comm.rank == first,
                      INVARIANT if self.copies is comm else VARYING)  # one head for all

    def forward(self, x: Tensor) -> Tensor:
        if self.copies is None:
            return enter_linear(self.comm, x, self.weight, self.bias, self.sequence)
        kv_weight, kv_bias = (copy_to(self.copies, p) for p in (self.kv_weight, self.kv_bias))
        weight, bias = torch.cat([self.q_weight, kv_weight]), torch.cat([self.q_bias, kv_bias])
        return enter_linear(self.comm, x, weight, bias, self.sequence)


class VocabEmbedding(ShardedModule):
    """tokens (b, s) → (b, s, h): an embedding of which each rank holds v/t rows, cut unevenly if t
    doesn't divide v. Tokens of other ranks count as 0, and an all-reduce adds up.

    Initial values as in `ColumnLinear`; the padding_idx of `like` stays. sequence: the output is
    (b, s/t, h), by a reduce-scatter. Raises `ConfigError` if a token is not in the vocabulary.
    """

    def __init__(self, comm: Comm, vocab: int, hidden: int, *, sequence: bool | str = False,
                 like: nn.Embedding | None = None):
        super().__init__(comm, sequence)
        if vocab < comm.size:
            raise ConfigError(f"{comm.size} ranks can't share a vocabulary of {vocab}")
        self.vocab, self.rows = vocab, share(vocab, comm)
        whole = checked_like(like or nn.Embedding(vocab, hidden), nn.Embedding, vocab, hidden)
        if whole.max_norm is not None or whole.scale_grad_by_freq or whole.sparse:
            raise ConfigError("VocabEmbedding takes an nn.Embedding without max_norm, "
                              "scale_grad_by_freq and sparse")
        padding = -1 if whole.padding_idx is None else whole.padding_idx
        self.padding_row = padding - self.rows.start if padding in self.rows else None
        self.keep("weight", "weight", whole.weight, 0, [self.rows])

    def forward(self, tokens: Tensor) -> Tensor:
        check_input(tokens, self.weight, multiplied=False)
        check_vocabulary("token", tokens, self.vocab)
        row, mine = local_index(tokens, self.rows.start, len(self.rows))
        partial = embedding(row, self.weight, self.padding_row)
        return leave(self.comm, partial.masked_fill(~mine.unsqueeze(-1), 0.0), self.sequence)


def vocab_cross_entropy(comm: Comm, logits: Tensor, targets: Tensor, reduction: str = "mean",
                        ignore_index: int = -100, label_smoothing: float = 0.0) -> Tensor:
    """torch's cross_entropy of logits (…, v) of which each rank has its columns (…, v/t), in order
    of ranks, the number of which may differ; targets (…) int64, the same on all ranks.

    No rank ever holds a row of all logits: three numbers a row travel, the largest logit, the sum
    of the exponentials and the target's logit (smoothed: plus its share of the mean logit).
    Computed in float32 at least, and stable: the largest logit is subtracted first.
    Cost: all-reduces of one and of two numbers a row, and an all-gather of the widths.
    Raises `ConfigError` if a target is neither in the vocabulary nor `ignore_index`.
    Source: Shoeybi et al. 2019, §3.
    """
    check_comm(comm, "vocab_cross_entropy(comm, …)")
    check_loss(logits, targets, reduction, label_smoothing)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    widths = column_counts(comm, logits)
    counted = targets != ignore_index
    check_vocabulary("target", targets.masked_fill(~counted, 0), widths.sum())
    highest = all_reduce(comm, logits.detach().amax(-1), op="max")
    shifted = logits - highest.unsqueeze(-1)
    row, mine = local_index(targets, widths[: comm.rank].sum(), logits.shape[-1])
    own = shifted.gather(-1, row.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0.0)
    if label_smoothing:
        own = (1 - label_smoothing) * own + label_smoothing * shifted.sum(-1) / widths.sum()
    exponentials, own = reduce_from(comm, torch.stack([shifted.exp().sum(-1), own]))
    losses = (exponentials.log() - own).masked_fill(~counted, 0.0)
    if reduction == "none":
        return losses  # type: ignore[no-any-return]
    return losses.sum() / (counted.sum() if reduction == "mean" else 1)  # type: ignore[no-any-return]


def check_loss(logits: Tensor, targets: Tensor, reduction: str, label_smoothing: float) -> None:
    """Raise `ConfigError` unless these are arguments of `vocab_cross_entropy`."""
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"reduction must be mean, sum or none, not {reduction!r}")
    if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing <= 1:
        raise ConfigError(f"label_smoothing must lie in [0, 1], not {label_smoothing!r}")
    if not isinstance(logits, Tensor) or not isinstance(targets, Tensor) or not logits.dim():
        raise ConfigError(f"vocab_cross_entropy takes a tensor of logits (…, v/t) and one of "
                          f"targets, not {short(logits)} and {short(targets)}")
    if targets.shape != logits.shape[:-1] or targets.dtype != torch.int64:
        raise ConfigError(f"logits of shape {tuple(logits.shape)} need int64 targets of shape "
                          f"{tuple(logits.shape[:-1])}, not {targets.dtype} of "
                          f"{tuple(targets.shape)}")


def column_counts(comm: Comm, logits: Tensor) -> Tensor:
    """The number of each rank's columns. Raises `ConfigError`, on all ranks, if one has none."""
    widths = all_gather(comm, torch.tensor(logits.shape[-1], device=comm.device)).to(logits.device)
    if not widths.is_meta and not widths.all():
        raise ConfigError(f"each rank needs at least one column of the logits, but the ranks have "
                          f"{widths.tolist()}")
    return widths


def check_vocabulary(noun: str, index: Tensor, vocab: int | Tensor) -> None:
    """Raise `ConfigError`, as torch raises IndexError, unless all of `index` lie in 0 … vocab−1."""
    outside = (index < 0) | (index >= vocab)
    if not index.is_meta and outside.any():
        raise ConfigError(f"{noun} {int(index[outside][0])} is not in the vocabulary, which is 0 … "
                          f"{int(vocab) - 1}")


def local_index(index: Tensor, first: int | Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(index − first where this rank has it, else 0; has it?) of the rows first … first+count−1."""
    local = index - first
    mine = (local >= 0) & (local < count)
    return local.masked_fill(~mine, 0), mine


def shard(gpt: GPT, comm: Comm, sequence: bool | str = False) -> GPT:
    """In place: keep of `gpt`, which is the same on all ranks, this rank's part; returns it. It
    returns this rank's logits, (b, s, v/t): take `vocab_cross_entropy` of them. Seeds of dropout
    that it isn't given are rank 0's.

    sequence: also cut what lies between the layers' matrices by positions, of which t must divide
    the number; "regather" keeps less for backward, and gathers more.
    Cost of a step, a layer: 4 all-reduces of b·s·h elements; with `sequence` 4 all-gathers and 4
    reduce-scatters ("regather": 6 and 4), and all-reduces of h elements for norms and biases.
    Clip with `parallel.clip_grad_norm_`: torch's takes the norm of this rank's parts, as GradScaler
    looks for infinities in these, so that ranks would disagree: take bfloat16, which needs none.
    Raises `ConfigError` if `gpt` differs from rank to rank, was sharded before, or doesn't divide.
    """
    check_shardable(gpt, comm)
    check_sequence(sequence)
    if sequence:
        cut_positions(gpt, comm)
    gpt.draw_seeds = lambda tokens: draw_shared_seeds(comm, tokens)
    c = gpt.config
    gpt.tokens = VocabEmbedding(comm, c.vocab, c.hidden, sequence=sequence, like=gpt.tokens)
    if gpt.head is not None:
        gpt.head = ColumnLinear(comm, c.hidden, c.vocab, bias=False, sequence=sequence,
                                like=gpt.head)
    else:  # the product with the embedding's rows is column-parallel, too
        gpt.norm.register_forward_hook(lambda _norm, _inputs, x: enter(comm, x, sequence))
    block: Any
    for block in gpt.blocks:
        attention = block.attention
        attention.qkv = QKVLinear(comm, attention, sequence)
        attention.heads //= comm.size
        attention.kv_heads = max(attention.kv_heads // comm.size, 1)
        attention.dropout.part = 0, comm.rank, comm.size  # heads
        attention.out = RowLinear(comm, c.hidden, c.hidden, sequence=sequence, like=attention.out)
        block.mlp_up = ColumnLinear(comm, c.hidden, 4 * c.hidden, sequence=sequence,
                                    like=block.mlp_up)
        block.mlp_down = RowLinear(comm, 4 * c.hidden, c.hidden, sequence=sequence,
                                   like=block.mlp_down)
    return gpt


def draw_shared_seeds(comm: Comm, tokens: Tensor) -> Tensor:
    """Seeds (b,) for the samples of `tokens`, from rank 0's generator, the same on all ranks."""
    return broadcast(comm, draw_seeds(tokens))


def check_shardable(gpt: GPT, comm: Comm) -> None:
    """Raise `ConfigError`, on all ranks, unless `gpt` is a whole GPT, and the same on all ranks."""
    if not isinstance(gpt, GPT):
        raise ConfigError(f"tensor.shard takes a dtlab.models.GPT, not {type(gpt).__name__}; build "
                          f"other models of ColumnLinear and RowLinear")
    if isinstance(gpt.tokens, VocabEmbedding):
        raise ConfigError("this GPT was sharded before; shard a new one")
    check_comm(comm, "tensor.shard(gpt, comm)")
    sums = {name: f"adds up to {'nothing' if p.is_meta else float(p.detach().double().sum())}"
            for name, p in gpt.named_parameters()}
    check_same(comm, "ranks hold different models; give GPT the same config and seed",
               {"config": f"is {gpt.config}"} | sums)


def check_input(x: Tensor, weight: Tensor, multiplied: bool = True) -> None:
    """Raise `ConfigError` unless `x` and `weight` lie on one device and, if they are multiplied,
    have one dtype, and `ShapeMismatch` unless their shapes fit."""
    if x.device != weight.device:
        raise ConfigError(f"the layer's parameters lie on {weight.device}, its input on "
                          f"{x.device}; move one of them (what is on the device meta has no data: "
                          f"fill what module.to_empty(device=…) makes)")
    if multiplied and x.dtype != weight.dtype and not torch._C._is_any_autocast_enabled():
        raise ConfigError(f"the layer computes in {weight.dtype}; convert its input with "
                          f"x.to({weight.dtype}), which is {x.dtype}, or the layer's parameters")
    if multiplied and x.shape[-1:] != weight.shape[1:]:
        raise ShapeMismatch(f"the layer takes (…, {weight.shape[1]}) here, not {tuple(x.shape)}")


def checked_like(like: Any, kind: type[nn.Module], *shape: int) -> Any:
    """The module `like`, which must be of this kind, and its weight of this shape."""
    if not isinstance(like, kind) or like.weight.shape != shape:
        raise ConfigError(f"`like` must be an nn.{kind.__name__} with a weight of shape {shape}, "
                          f"not {short(like)}")
    return like


def scaled(rows: range, by: int) -> range:
    """The rows of whole heads of `by` rows each."""
    return range(rows.start * by, rows.stop * by)


def enter(comm: Comm, x: Tensor, sequence: bool | str) -> Tensor:
    """`x` enters a tensor-parallel region."""
    entered: Tensor = gather_from(comm, x) if sequence else copy_to(comm, x)
    return entered


def leave(comm: Comm, x: Tensor, sequence: bool | str) -> Tensor:
    """The sum of the ranks' `x` leaves it."""
    left: Tensor = reduce_scatter_to(comm, x) if sequence else reduce_from(comm, x)
    return left


def enter_linear(comm: Comm, x: Tensor, weight: Tensor, bias: Tensor | None,
                 sequence: bool | str) -> Tensor:
    """`x` enters, and is multiplied by this rank's rows of a weight."""
    check_input(x, weight)
    if sequence == "regather":
        product: Tensor = gather_linear(comm, x, weight, bias)
        return product
    return linear(enter(comm, x, sequence), weight, bias)
