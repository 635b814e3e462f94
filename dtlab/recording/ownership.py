"""The pieces that each rank has, where they are only moved: each is known by its contents.

For gather, scatter, all-gather and all-to-all. Every element of the piece j that rank c gives says
so: it holds `piece_numbers(p)[j, c]`. So a piece is found in any buffer, and a rank *has* what it
began with and all that it has received. Only the result has an order: there a piece counts if it
lies where it belongs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

MISPLACED = 2  # in `CollectiveFrame.holds`: something else lies in its place


def piece_numbers(p: int) -> torch.Tensor:
    """A number for the piece j of rank c, at [j, c]: 1 and up. Shape (p, p), exact in float32."""
    return torch.arange(1.0, p * p + 1).view(p, p)


def pieces_in(data: torch.Tensor | None, p: int) -> np.ndarray:
    """Find the pieces in `data`: found[j, c] for the piece j of rank c. Shape (p, p)."""
    found = np.zeros(p * p + 1, bool)
    if data is not None:
        numbers = data.detach().reshape(-1).double().nan_to_num(0.0).numpy()
        known = numbers[(numbers >= 1) & (numbers <= p * p) & (numbers == np.floor(numbers))]
        found[known.astype(int)] = True
    return found[1:].reshape(p, p)


def correct_order_(holds: np.ndarray, wanted: np.ndarray, result: Any) -> None:
    """In place: correct what one rank holds, (p, p), by its result, in which order counts.

    wanted (p, p): the pieces that must be in the result, in this order. A piece that isn't in its
    place does not count; what is there instead is `MISPLACED`.
    """
    p, expected = len(holds), np.argwhere(wanted)
    numel = result.numel() if isinstance(result, torch.Tensor) else 0
    if not len(expected):
        return
    fits = numel and numel % len(expected) == 0
    rows = result.reshape(len(expected), -1) if fits else [None] * len(expected)
    for (piece, owner), row in zip(expected, rows, strict=True):
        there = pieces_in(row, p)
        right = there[piece, owner] and there.sum() == 1
        holds[piece, owner] = int(right)
        if not right and there.any():  # show whose it is, if the place is for one piece only
            others = there.any(axis=0) if wanted[piece].sum() == 1 else np.arange(p) == owner
            holds[piece, others] = MISPLACED
