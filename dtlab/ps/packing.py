"""The payload of a message: flat tensors, big ones alone, small ones of one dtype joined."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

BIG_BYTES = 1 << 16  # tensors from this size up travel alone
Size = tuple[torch.dtype, int]  # of a flat tensor: its dtype and number of elements


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in headers."""
    return str(dtype).removeprefix("torch.")


def grouped(sizes: Sequence[Size]) -> list[list[int]]:
    """Group flat tensors that travel as one: small ones of one dtype do.

    >>> grouped([(torch.float32, 3), (torch.float32, 1 << 20), (torch.float32, 5)])
    [[0, 2], [1]]
    """
    groups: list[list[int]] = []
    small: dict[torch.dtype, list[int]] = {}
    for place, (dtype, numel) in enumerate(sizes):
        if numel * dtype.itemsize >= BIG_BYTES:
            groups.append([place])
        elif dtype in small:
            small[dtype].append(place)
        else:
            small[dtype] = [place]
            groups.append(small[dtype])
    return groups


def pack(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Flat tensors as a payload; those that travel alone are not copied."""
    sizes = [(x.dtype, x.numel()) for x in tensors]
    return [tensors[group[0]] if len(group) == 1 else torch.cat([tensors[i] for i in group])
            for group in grouped(sizes)]


def unpack(payload: Sequence[torch.Tensor], sizes: Sequence[Size]) -> list[torch.Tensor]:
    """The tensors that `pack` has packed, as views of the payload."""
    found: dict[int, torch.Tensor] = {}
    for x, group in zip(payload, grouped(sizes), strict=True):
        parts = x.split([sizes[i][1] for i in group]) if len(group) > 1 else [x]
        found.update(zip(group, parts, strict=True))
    return [found[place] for place in range(len(sizes))]
