"""The speed of the collectives on this machine, beside torch.distributed's own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dtlab import cost
from dtlab.bench.calls import elements, in_a_row, prepared, spread, take_turns
from dtlab.checks import check_whole
from dtlab.collectives import ALGORITHMS
from dtlab.collectives.registry import check_algorithm
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.processes import run

TORCH = "torch"  # the peer's name in the rows


class CollectiveTime(NamedTuple):
    """One contestant at one size. Bandwidths as nccl-tests defines them, in bytes per second."""

    collective: str
    algorithm: str  # or "torch"
    ranks: int
    nbytes: int
    elements: int
    dtype: str
    time_s: float  # median over the repetitions of the slowest rank's time
    fastest_s: float
    slowest_s: float
    repeats: int
    algorithm_Bps: float | None  # bytes / time; None where no bytes count
    bus_Bps: float | None  # × cost.bus_factor: comparable between rank counts
    ratio: float | None  # time / torch's time in the same run: under 1 is faster; None: no peer


def measure(collective: str, nbytes: int, ranks: int = 4, algorithms: Sequence[str] = (),
            repeats: int = 9, dtype: torch.dtype = torch.float32, device: str = "cpu",
            backend: str = "gloo") -> list[CollectiveTime]:
    """Time every algorithm (or those named) and torch's own, in one run, taking turns: a row each.

    nbytes: of the vector, as in `dtlab.cost`. device, backend: as in `run`. Nothing is traced. A
    repetition's time is that of the slowest rank, from the moment it left a barrier; calls are
    timed `in_a_row`. Raises `ConfigError` for names that there are not, and bytes that don't make
    equal pieces.
    """
    if isinstance(algorithms, str):
        raise ConfigError(f"algorithms is a list of names, such as [{algorithms!r}]")
    names = list(algorithms) or list(ALGORITHMS.get(str(collective), {}))
    for name in names or ["auto"]:
        check_algorithm(collective, name)
    check_whole("repeats", repeats)
    count = elements(collective, ranks, nbytes, dtype)
    result = run(_time_all, collective, names, nbytes, dtype, repeats, ranks=ranks, device=device,
                 backend=backend, trace=False, timeout=600, echo=False)
    # By contestant: one time a repetition, the slowest rank's.
    times = {name: [max(turn) for turn in zip(*(mine[name] for mine in result.values), strict=True)]
             for name in result.values[0]}
    peer_s = statistics.median(times[TORCH]) if TORCH in times else None
    rows = []
    for name, took in times.items():
        time_s = statistics.median(took)
        rate = nbytes / time_s if nbytes else None
        rows.append(CollectiveTime(
            collective, name, ranks, nbytes, count, str(dtype).removeprefix("torch."),
            *spread(took), rate,
            None if rate is None else rate * cost.bus_factor(collective, ranks),
            None if peer_s is None else time_s / peer_s))
    return rows


def _time_all(comm: Comm, collective: str, names: list[str], nbytes: int, dtype: torch.dtype,
              repeats: int) -> dict[str, list[float]]:
    """Return this rank's seconds a call, by contestant and repetition."""
    contestants: dict[str, Callable[[], Any]] = {
        name: prepared(comm, collective, name, nbytes, dtype, comm.device) for name in names}
    count = elements(collective, comm.size, nbytes, dtype)
    peers = torch_calls(torch.zeros(count, dtype=dtype, device=comm.device), comm.size)
    if collective in peers:
        contestants[TORCH] = peers[collective]
    return take_turns(comm, contestants, repeats, in_a_row(nbytes))


def torch_calls(x: torch.Tensor, p: int) -> dict[str, Callable[[], Any]]:
    """Torch's own collectives on the whole vector `x`, of p ranks, over the same backend.

    It has no scans. Its reduce-scatter over Gloo is an all-reduce and a slice.
    """
    mine, received = torch.zeros_like(x[: x.numel() // p]), torch.empty_like(x)
    parts = list(x.chunk(p)) if dist.get_rank() == 0 else None
    return {
        "broadcast": lambda: dist.broadcast(x, src=0),
        "reduce": lambda: dist.reduce(x, dst=0),
        "scatter": lambda: dist.scatter(mine, parts, src=0),
        "gather": lambda: dist.gather(mine, parts, dst=0),
        "all_gather": lambda: dist.all_gather_into_tensor(x, mine),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(mine, x),
        "all_reduce": lambda: dist.all_reduce(x),
        "all_to_all": lambda: dist.all_to_all_single(received, x),
        "barrier": dist.barrier,
    }
