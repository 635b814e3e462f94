"""Closed forms of the barrier: no bytes, only rounds."""

from __future__ import annotations

from dtlab.cost.model import Form, costs, lg_ceil


@costs("barrier", "dissemination")
def dissemination(p: int, n: int, itemsize: int) -> Form:
    """⌈lg p⌉α: in round k everyone tells the rank 2^k further on."""
    return Form(lg_ceil(p), 0, 0, [0] * p, [lg_ceil(p)] * p)
