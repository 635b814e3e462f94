"""From the call of a collective to an algorithm: which one, and what its messages are for."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from dtlab import cost
from dtlab.collectives.auto import cheapest
from dtlab.collectives.registry import check_algorithm, check_tensor, choose
from dtlab.comm import Comm
from dtlab.machine import Machine


def call_for(
    comm: Comm, collective: str, algorithm: str, options: dict[str, Any],
    x: torch.Tensor | None = None, pieces: int = 1, writes: bool = True, **how: Any,
) -> tuple[Callable[..., Any], Comm]:
    """Return what this call of a collective runs: a bare algorithm, and a communicator whose
    messages carry the label of this call, which is equal on all ranks that call the same thing.
    `how`: the call's other arguments, for the label.

    algorithm: "auto" is what costs least here; the vector that the closed forms call n is `pieces`
    times as large as `x`. Raises `ConfigError` for what there is not, and unless `x` is a dense
    tensor on the communicator's device.
    """
    check_algorithm(collective, algorithm)
    kind: tuple[Any, ...] = None, False, None
    if collective != "barrier":
        check_tensor(comm, x, collective, writes)
        assert x is not None
        kind = x.dtype, x.is_meta, x.shape
    shown = {key: value if value.__class__ in (str, int) else getattr(value, "__name__", str(value))
            for key, value in (options | how if options else how).items()}
    machine = comm.machine if algorithm == "auto" else None
    name, label = _resolved(collective, algorithm, comm.size, pieces, machine, *kind, **shown)
    return choose(collective, name, options), comm.collective(label)


@cost.remembered  # a ring of small messages would notice the time that this takes
def _resolved(
    collective: str, algorithm: str, ranks: int, pieces: int, machine: Machine | None,
    dtype: torch.dtype | None, meta: bool, shape: torch.Size | None, /, **arguments: Any,
) -> tuple[str, str]:
    """The name of the algorithm, and the label.

    >>> _resolved("reduce", "flat", 4, 1, None, torch.float32, False, torch.Size([2, 3]), root=0)[1]
    'reduce(float32 [2, 3], algorithm=flat, root=0)'
    """
    itemsize = dtype.itemsize if dtype is not None else 1
    if machine is not None:
        nbytes = pieces * math.prod(shape) * itemsize if shape is not None else 0
        algorithm = cheapest(collective, ranks, nbytes, itemsize, machine)
    details = [f"{key}={value}" for key, value in {"algorithm": algorithm, **arguments}.items()]
    if shape is not None:
        name = str(dtype).removeprefix("torch.") + " meta" * meta
        details.insert(0, f"{name} {list(shape)}")
    return algorithm, sys.intern(f"{collective}({', '.join(details)})")
