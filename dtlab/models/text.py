"""Text to train on that every Python ships: the language reference, as `help()` prints it."""

from __future__ import annotations

from functools import lru_cache
from pydoc_data.topics import topics

import torch

from dtlab.checks import check_whole


@lru_cache(maxsize=1)
def text() -> torch.Tensor:
    """The reference as bytes: (n,) uint8, some 600,000. It differs between versions of Python, so
    compare a training run only with one of the same version. Don't change it in place."""
    whole = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(whole.encode()), dtype=torch.uint8)


def text_batch(step: int, size: int, context: int, seed: int = 0
               ) -> tuple[torch.Tensor, torch.Tensor]:
    """The `step`-th batch of `size` pieces of text: (tokens, targets), each (size, context) int64;
    targets are the tokens that follow. Equal for equal arguments. Raises `ConfigError` for a
    `context` that is longer than the text."""
    data = text()
    check_whole("step", step, 0)
    check_whole("a batch's size", size, 0)
    check_whole("context", context, most=len(data) - 1)
    check_whole("seed", seed, 0)
    random = torch.Generator().manual_seed(1_000_003 * seed + step)
    starts = torch.randint(len(data) - context, (size, 1), generator=random, device="cpu")
    pieces = data[starts + torch.arange(context + 1, device="cpu")].long()
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()
