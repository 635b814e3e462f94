"""Uninitialized memory, as torch.empty gives it, made the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Inside, torch.empty gives NaN, or the largest whole number, instead of whatever was in
    memory. (torch.use_deterministic_algorithms would load a compiler first, for a second.)"""
    before = torch.are_deterministic_algorithms_enabled()
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before, warn_only=only_warn)
