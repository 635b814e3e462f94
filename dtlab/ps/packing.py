"""Tensors as they travel between nodes: flat, big ones alone, small ones of one dtype together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

BIG_BYTES = 1 << 16  # tensors from this size up travel alone, and side by side with others' letters
Size = tuple[torch.dtype, int]  # of a flat tensor: its dtype and number of elements


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """What letters call it."""
    return str(dtype).removeprefix("torch.")


def together(sizes: Sequence[Size]) -> list[list[int]]:
    """Which flat tensors share a wire: big ones go alone, small ones of one dtype in one go.

    >>> together([(torch.float32, 3), (torch.float32, 1 << 20), (torch.float32, 5)])
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
    """Flat tensors as wires; those that travel alone are not copied."""
    sizes = [(x.dtype, x.numel()) for x in tensors]
    return [tensors[group[0]] if len(group) == 1 else torch.cat([tensors[i] for i in group])
            for group in together(sizes)]


def unpack(wires: Sequence[torch.Tensor], sizes: Sequence[Size]) -> list[torch.Tensor]:
    """The tensors that `pack` has packed, as views of the wires."""
    found: dict[int, torch.Tensor] = {}
    for wire, group in zip(wires, together(sizes), strict=True):
        parts = wire.split([sizes[i][1] for i in group]) if len(group) > 1 else [wire]
        found.update(zip(group, parts, strict=True))
    return [found[place] for place in range(len(sizes))]
