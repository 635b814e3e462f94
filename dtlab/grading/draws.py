"""The inputs of exercises. Each draw begins with a hash of the seed, the case and the rank: the
inputs of one rank tell nothing about another's."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import torch


def generator(*of: object) -> np.random.Generator:
    """Random numbers of a draw. of: the seed, and what tells this draw from all others of this
    seed: the case and the rank. The same on every machine."""
    hashed = int.from_bytes(sha256(repr(of).encode()).digest(), "big")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(hashed, pool_size=8)))


def numbers(of: object, shape: tuple[int, ...], dtype: torch.dtype, most: int = 99
            ) -> torch.Tensor:
    """Whole numbers from 1 to `most`, small enough to be exact in any dtype: so every order of
    summing gives the same bits. of: (seed, the case, the rank)."""
    return torch.from_numpy(np.asarray(generator(of).integers(1, most + 1, shape))).to(dtype)


def widest(seed: int, dtype: torch.dtype, shown: int = 9) -> int:
    """The largest whole number of which sixteen add up exactly in this dtype: smaller numbers could
    travel in messages of fewer bytes. `shown` for seed 0, whose inputs learners see."""
    floats = dtype.is_floating_point or dtype.is_complex
    exact = 2 / torch.finfo(dtype).eps if floats else torch.iinfo(dtype).max
    return int(exact) // 16 if seed else shown


def normals(of: object, *shapes: int | tuple[int, ...], dtype: torch.dtype = torch.float64
            ) -> list[torch.Tensor]:
    """A tensor of each shape, normal, all for one rank. of: (seed, the case, the rank)."""
    random = generator(of)
    return [torch.from_numpy(np.asarray(random.standard_normal(shape))).to(dtype)
            for shape in shapes]


def varied(seed: int, most: int, *of: object) -> int:
    """0 for seed 0, whose inputs learners see: these stay round. Else one of 0 … most − 1."""
    return int(generator(seed, *of).integers(most)) if seed else 0


def scale(seed: int, *of: object, most: float = 2.0) -> float:
    """1 for seed 0, else one of ten thousand factors from 1 to `most`."""
    return 1 + (most - 1) * varied(seed, 10_000, *of) / 10_000
