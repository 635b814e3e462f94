"""A small convolutional network for the digits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtlab.checks import check_whole


class CNN(nn.Module):
    """Two convolutions with ReLU, each followed by pooling, and a linear layer.

    x (b, 64), or (b, 1, 8, 8) → logits (b, 10).
    batch_norm: normalise after each convolution. A batch's statistics are those of the samples that
    one rank sees, so a model that has it trains otherwise when its batch is split. seed: of the
    initial parameters, which are torch's; dtype: None for torch's default.
    """

    def __init__(self, channels: int = 8, batch_norm: bool = False, *, seed: int = 0,
                 dtype: torch.dtype | None = None):
        super().__init__()
        check_whole("channels", channels)
        check_whole("CNN's seed", seed, -2**63)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Conv2d(1, channels, 3, padding=1)
            self.second = nn.Conv2d(channels, 2 * channels, 3, padding=1)
            self.out = nn.Linear(2 * channels * 2 * 2, 10)
        self.first_norm = nn.BatchNorm2d(channels) if batch_norm else nn.Identity()
        self.second_norm = nn.BatchNorm2d(2 * channels) if batch_norm else nn.Identity()
        self.to(dtype or torch.get_default_dtype())

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 1, 8, 8)
        x = nn.functional.max_pool2d(self.first_norm(self.first(x)).relu(), 2)
        x = nn.functional.max_pool2d(self.second_norm(self.second(x)).relu(), 2)
        return self.out(x.flatten(1))  # type: ignore[no-any-return]
