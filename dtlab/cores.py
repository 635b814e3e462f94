"""How many cores go over large memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

LARGE_BYTES = 4 << 20  # below, a second core would hardly have been woken
CORES = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, 4)
_AS_IT_IS = nullcontext()


@contextmanager
def _several() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, CORES))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def several_cores(nbytes: int) -> AbstractContextManager[None]:
    """Inside, torch takes several cores, if it goes over as many bytes as these at once: one alone
    can't keep memory busy, and who waits for this one has no use for theirs. Only for what gives
    the same bits on any number of cores: copies, and what works element by element."""
    return _several() if nbytes >= LARGE_BYTES else _AS_IT_IS
