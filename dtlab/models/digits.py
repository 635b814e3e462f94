"""Handwritten digits: real data, small enough to come with the course.

1797 images of 8 × 8 pixels, of 10 classes, written by 13 people: the test set of "Optical
Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, 1998, UCI Machine Learning
Repository, https://doi.org/10.24432/C50P49, under CC BY 4.0. Pixels count the dark dots of a
4 × 4 block, 0 to 16.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from dtlab.checks import check_whole, short
from dtlab.errors import ConfigError

FILE = Path(__file__).with_name("digits.npz")
TRAINING = 1500  # of 1797 images; the rest is for tests


class Digits(NamedTuple):
    """Images as rows of 64 numbers from 0 to 1, and the digits that they show."""

    x: torch.Tensor  # (N, 64)
    y: torch.Tensor  # (N,), int64

    def batch(self, step: int, size: int, seed: int = 0) -> Digits:
        """The `step`-th batch of `size`: every image once an epoch, in an order that `seed` and
        the epoch decide. Rows that are left over at the end of an epoch sit it out. Raises
        `ConfigError` unless `size` is 1 to the number of images."""
        check_whole("step", step, 0)
        check_whole("a batch's size", size, most=len(self.y))
        check_whole("seed", seed, 0)
        per_epoch = len(self.y) // size
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(
            len(self.y), device="cpu",
            generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))
        rows = order[place * size : (place + 1) * size]
        return Digits(self.x[rows], self.y[rows])

    def shard(self, rank: int, size: int) -> Digits:
        """Every `size`-th image from `rank` on: what one of `size` workers keeps."""
        check_whole("size", size)
        check_whole("rank", rank, 0, int(size) - 1)
        return Digits(self.x[rank::size], self.y[rank::size])


@lru_cache(maxsize=4)
def digits(dtype: torch.dtype = torch.float32) -> tuple[Digits, Digits]:
    """(training, test): 1500 and 297 images, both well mixed. Don't change them in place. dtype: of
    the images, a float."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"digits are of a floating-point dtype, not {short(dtype)}")
    with np.load(FILE) as file:
        images, labels = file["images"], file["labels"]
    mixed = np.random.default_rng(0).permutation(len(labels))
    x = torch.from_numpy(images[mixed].reshape(-1, 64)).to(dtype) / 16
    y = torch.from_numpy(labels[mixed]).long()
    return Digits(x[:TRAINING], y[:TRAINING]), Digits(x[TRAINING:], y[TRAINING:])
