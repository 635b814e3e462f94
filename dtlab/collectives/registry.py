"""The registry: every collective, every algorithm, by name.

The command line, the plots, the tests and the grader all read it; a new algorithm is one new
function under `@algorithm(...)`, and its closed form in `dtlab.cost`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import torch

from dtlab.comm import Comm
from dtlab.errors import ConfigError, ShapeMismatch
from dtlab.reduction import overlaps_itself

ALGORITHMS: dict[str, dict[str, Callable[..., Any]]] = {}
Function = TypeVar("Function", bound=Callable[..., Any])


def algorithm(collective: str, name: str) -> Callable[[Function], Function]:
    """Register the decorated function as `ALGORITHMS[collective][name]`."""

    def register(function: Function) -> Function:
        ALGORITHMS.setdefault(collective, {})[name] = function
        return function

    return register


def choose(collective: str, name: str) -> Callable[..., Any]:
    """The function registered under these names, else `ConfigError` that lists the known ones."""
    if name not in ALGORITHMS[collective]:
        known = ", ".join(ALGORITHMS[collective])
        raise ConfigError(f"{collective} has no algorithm {name!r}; choose one of: {known}")
    return ALGORITHMS[collective][name]


def check_tensor(comm: Comm, x: Any, collective: str) -> None:
    """Raise unless `x` is a dense tensor on the communicator's device (or on "meta": no data)."""
    if not isinstance(x, torch.Tensor):
        raise ConfigError(
            f"rank {comm.rank}: {collective} takes a tensor, not {type(x).__name__}; "
            f"wrap numbers in torch.tensor(...)"
        )
    if x.device.type not in (comm.device.type, "meta"):
        raise ConfigError(
            f"rank {comm.rank}: {collective} got a tensor on {x.device}, but this communicator "
            f"works on {comm.device}; move it with .to(comm.device)"
        )
    if x.layout is not torch.strided:
        raise ShapeMismatch(f"rank {comm.rank}: {collective} needs a dense tensor, not {x.layout}")
    if not x.is_contiguous() and overlaps_itself(x):
        raise ShapeMismatch(f"rank {comm.rank}: {collective} can't change an expanded tensor: its "
                            f"elements share memory; give it a copy (x.contiguous())")


def check_root(comm: Comm, root: int, collective: str) -> None:
    """Raise `ConfigError` unless `root` is one of the ranks."""
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < comm.size:
        raise ConfigError(
            f"rank {comm.rank}: {collective} has no root {root!r}; "
            f"the ranks here are 0 to {comm.size - 1}"
        )


def signature(collective: str, x: torch.Tensor, **how: Any) -> str:
    """How this call is labelled: equal on all ranks, if they call the same thing.

    >>> signature("reduce", torch.zeros(2, 3), op="sum", root=0)
    'reduce(float32 [2, 3], op=sum, root=0)'
    """
    dtype = str(x.dtype).split(".")[-1] + " meta" * x.is_meta
    details = "".join(f", {key}={getattr(value, '__name__', value)}" for key, value in how.items())
    return f"{collective}({dtype} {list(x.shape)}{details})"


def flattened(x: torch.Tensor) -> torch.Tensor:
    """`x` as a contiguous vector without history: a view where possible, else a copy."""
    return x.detach().reshape(-1)


def write_back(x: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """If `flat` had to be a copy of `x`, copy the result into `x`. Returns `x`."""
    if not x.is_meta and flat.data_ptr() != x.data_ptr():
        x.detach().copy_(flat.view(x.shape))
    return x


@lru_cache(maxsize=64)  # simulated ranks share one list: thousands of them would fill the caches
def chunk_edges(n: int, parts: int) -> tuple[int, ...]:
    """Where to cut n elements into `parts` chunks: chunk c is x[edges[c]:edges[c + 1]].

    Sizes differ by one at most, the larger ones first, as torch.tensor_split cuts.
    """
    small, extra = divmod(n, parts)
    return tuple(c * small + min(c, extra) for c in range(parts + 1))


def cut(x: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
    """The vector `x` in `parts` chunks, which are views: see `chunk_edges`."""
    edges = chunk_edges(x.numel(), parts)
    return torch.split(x, [end - start for start, end in pairwise(edges)])
