"""The state of all random numbers of a process, as tensors and numbers."""

from __future__ import annotations

import random
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

# What draws Python's random numbers here: the module, or a generator of a simulated rank.
PYTHON: ContextVar[Any] = ContextVar("PYTHON", default=random)


def get_state() -> dict[str, Any]:
    """Return the state of torch (on the CPU, and on a GPU in use), NumPy and Python."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, words, gauss = PYTHON.get().getstate()
    state: dict[str, Any] = {  # tensors are as many bytes in a message, whatever the numbers
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(words, device="cpu"), gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype("int64")), *rest)}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_state(state: dict[str, Any]) -> None:
    """Go on as after `get_state`."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    PYTHON.get().setstate((version, tuple(words.tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
