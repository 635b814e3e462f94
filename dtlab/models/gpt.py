"""A small GPT: what GPT-2 computes, in shapes that a laptop trains. It knows nothing of ranks.

Shapes: b samples, s positions, h hidden, a heads of width d = h/a, k key-value heads, v vocabulary.
Source: Radford et al. 2019 (GPT-2); grouped-query attention: Ainslie et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dtlab.checks import check_flag, check_whole, short
from dtlab.errors import ConfigError
from dtlab.models.dropout import CounterDropout, check_probability


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a `GPT`. The defaults make one of 0.8 M parameters, which reads bytes.

    kv_heads: key-value heads, which divide `heads`: None is as many as heads (multi-head
    attention), fewer is grouped-query, 1 is multi-query attention.
    tied: the output layer uses the token embedding's weights.
    """

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    vocab: int = 256
    context: int = 128
    kv_heads: int | None = None
    dropout: float = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "context", "kv_heads"):
            if name != "kv_heads" or self.kv_heads is not None:
                check_whole(f"GPTConfig: {name}", getattr(self, name))
        if self.hidden % self.heads:
            raise ConfigError(f"GPTConfig: {self.heads} heads don't divide hidden={self.hidden}")
        if self.heads % (self.kv_heads or self.heads):
            raise ConfigError(f"GPTConfig: kv_heads={self.kv_heads} doesn't divide "
                              f"heads={self.heads}")
        check_probability("GPTConfig: dropout", self.dropout)
        check_flag("GPTConfig: tied", self.tied)


GPT2_SMALL = GPTConfig(layers=12, hidden=768, heads=12, vocab=50257, context=1024)


class Attention(nn.Module):
    """Causal self-attention: x (b, s, h) → (b, s, h)."""

    def __init__(self, config: GPTConfig, site: int):
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.head_dim = config.hidden // config.heads
        self.dropout = CounterDropout(config.dropout, site)
        self.qkv = nn.Linear(config.hidden, (self.heads + 2 * self.kv_heads) * self.head_dim)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor, seeds: Tensor | None) -> Tensor:
        qkv = self.qkv(x)
        b, s, _ = qkv.shape
        groups = self.heads, self.kv_heads, self.kv_heads
        q, k, v = (part.view(b, s, -1, self.head_dim).transpose(1, 2)  # (b, heads, s, d)
                   for part in qkv.split([n * self.head_dim for n in groups], dim=-1))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5  # (b, a, s, s)
        future = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        weights = self.dropout(scores.masked_fill(future, -torch.inf).softmax(-1), seeds)
        return self.out((weights @ v).transpose(1, 2).reshape(b, s, -1))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One transformer layer: attention, then an MLP, each on the normalised input and added to it.
    """

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        site = 1 + 3 * layer  # the first of its three places for dropout
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config, site)
        self.attention_dropout = CounterDropout(config.dropout, site + 1)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp_up = nn.Linear(config.hidden, 4 * config.hidden)
        self.mlp_down = nn.Linear(4 * config.hidden, config.hidden)
        self.mlp_dropout = CounterDropout(config.dropout, site + 2)

    def forward(self, x: Tensor, seeds: Tensor | None = None) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), seeds), seeds)
        wide = functional.gelu(self.mlp_up(self.mlp_norm(x)))
        return x + self.mlp_dropout(self.mlp_down(wide), seeds)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """tokens (b, s) int64 → logits (b, s, v).

    config: None for `GPTConfig()`; dtype, device: None for torch's defaults.
    seed: of the initial parameters, which are GPT-2's: normal with deviation 0.02, and
    0.02/√(2·layers) in the layers that end a residual branch; biases 0.

    >>> sum(p.numel() for p in GPT(GPT2_SMALL, device="meta").parameters())
    124439808
    """

    def __init__(self, config: GPTConfig | None = None, *, seed: int = 0,
                 dtype: torch.dtype | None = None, device: torch.device | str | None = None):
        super().__init__()
        self.config = config = GPTConfig() if config is None else config
        if not isinstance(config, GPTConfig):
            raise ConfigError(f"GPT takes a GPTConfig, not {short(config)}")
        check_whole("GPT's seed", seed, -2**63)
        with torch.device("meta"):  # nothing is drawn twice
            self.tokens: Any = nn.Embedding(config.vocab, config.hidden)
            self.positions = nn.Embedding(config.context, config.hidden)
            self.dropout = CounterDropout(config.dropout, 0)
            self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
            self.norm: nn.Module = nn.LayerNorm(config.hidden)
            self.head: Any = (None if config.tied
                              else nn.Linear(config.hidden, config.vocab, bias=False))
        self.to(dtype or torch.get_default_dtype())
        self.to_empty(device=device or torch.get_default_device())
        self._initialize(seed)
        self.draw_seeds: Callable[[Tensor], Tensor] = draw_seeds  # tensor.shard needs another

    @torch.no_grad()
    def _initialize(self, seed: int) -> None:
        random = torch.Generator().manual_seed(int(seed))
        for name, weight in self.named_parameters():
            if weight.is_meta:
                continue
            if "norm" in name or name.endswith("bias"):
                weight.fill_("norm" in name and name.endswith("weight"))
            else:
                ends_branch = name.endswith(("attention.out.weight", "mlp_down.weight"))
                scale = 0.02 / (2 * self.config.layers) ** 0.5 if ends_branch else 0.02
                drawn = torch.randn(weight.shape, generator=random, device="cpu")
                weight.copy_(scale * drawn)

    def forward(self, tokens: Tensor, seeds: Tensor | None = None) -> Tensor:
        """seeds: (b,) int64, which decide the dropout of each sample, so that a sample meets the
        same dropout in whatever batch it is; None draws them from torch's generator."""
        places = positions_of(tokens, self.config.context)
        if seeds is None and self.training and self.config.dropout:
            seeds = self.draw_seeds(tokens)
        x = self.tokens(tokens) + self.positions(places)  # (b, s, h)
        x = self.dropout(x, seeds)
        for block in self.blocks:
            x = block(x, seeds)
        x = self.norm(x)
        logits: Tensor = x @ self.tokens.weight.T if self.head is None else self.head(x)
        return logits


def positions_of(tokens: Tensor, context: int) -> Tensor:
    """The positions 0 … s−1 of `tokens` (b, s). Raises `ConfigError` if `context` has fewer."""
    if tokens.shape[-1] > context:
        raise ConfigError(f"GPT: {tokens.shape[-1]} positions are more than its context of "
                          f"{context}")
    return torch.arange(tokens.shape[-1], device=tokens.device)


def draw_seeds(tokens: Tensor) -> Tensor:
    """Seeds (b,) for the samples of `tokens`, from torch's generator."""
    return torch.randint(2**62, (len(tokens),), device=tokens.device)
