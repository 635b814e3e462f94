"""The inputs of exercises. Each draw begins with a hash of the seed, the case and the rank: the
inputs of one rank tell nothing about another's."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import torch


def generator(*key: object) -> np.random.Generator:
    """Return the random generator of one draw, the same on every machine. key: the seed, the case
    and the rank, so that each draw has a key of its own."""
    hashed = int.from_bytes(sha256(repr(key).encode()).digest(), "big")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(hashed, pool_size=8)))


def numbers(key: object, shape: tuple[int, ...], dtype: torch.dtype, most: int = 99
            ) -> torch.Tensor:
    """Draw whole numbers from 1 to `most`, small enough to be exact in any dtype, so that every
    order of summing gives the same bits. key: as in `generator`, a tuple."""
    return torch.from_numpy(np.asarray(generator(key).integers(1, most + 1, shape))).to(dtype)


def widest(seed: int, dtype: torch.dtype, shown: int = 9) -> int:
    """The largest whole number of which sixteen add up exactly in this dtype: smaller numbers could
    travel in messages of fewer bytes. `shown` for seed 0, whose inputs learners see."""
    floats = dtype.is_floating_point or dtype.is_complex
    exact = 2 / torch.finfo(dtype).eps if floats else torch.iinfo(dtype).max
    return int(exact) // 16 if seed else shown


def normals(key: object, *shapes: int | tuple[int, ...], dtype: torch.dtype = torch.float64
            ) -> list[torch.Tensor]:
    """Draw a normal tensor of each shape, all for one rank. key: as in `generator`, a tuple."""
    random = generator(key)
    return [torch.from_numpy(np.asarray(random.standard_normal(shape))).to(dtype)
            for shape in shapes]


def varied(seed: int, most: int, *key: object) -> int:
    """Draw one of 0 … most − 1; 0 for seed 0, so that the inputs that learners see are round."""
    return int(generator(seed, *key).integers(most)) if seed else 0


def scale(seed: int, *key: object, most: float = 2.0) -> float:
    """Draw one of ten thousand factors from 1 to `most`; 1 for seed 0."""
    return 1 + (most - 1) * varied(seed, 10_000, *key) / 10_000
