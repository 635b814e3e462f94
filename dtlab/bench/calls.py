"""One call of any collective in the registry, made from (bytes, dtype) alone; and how often."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtlab import collectives
from dtlab.checks import check_whole, short
from dtlab.collectives.registry import check_algorithm
from dtlab.comm import Comm
from dtlab.errors import ConfigError

# Here `nbytes` is the size of all pieces together (see dtlab.cost), and each rank brings one.
IN_PIECES = ("scatter", "gather", "all_gather", "reduce_scatter", "all_to_all")

TURNS_BEFORE = 6  # untimed: the first hundred calls of a fresh process are slower
WARM_UP = 4  # before each 4 calls that are timed, one is not: caches hold what ran before


def in_a_row(nbytes: int) -> int:
    """Return the number of calls timed together, as in nccl-tests: 20, fewer if that takes long."""
    return min(20, max(1, (32 << 20) // max(nbytes, 1)))


def take_turns(comm: Comm, calls: Mapping[str, Callable[[], object]], repeats: int,
               together: int = 1, before: int = TURNS_BEFORE) -> dict[str, list[float]]:
    """Return this rank's seconds a call, by contestant and repetition, each from a barrier on.

    together: calls that are timed as one. before: turns that only warm up.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-before, repeats):
        for name, call in calls.items():
            dist.barrier()
            for _ in range(together // WARM_UP):
                call()
            begun = time.perf_counter()
            for _ in range(together):
                call()
            if comm.device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 0:
                times[name].append((time.perf_counter() - begun) / together)
    return times


def spread(times: Sequence[float]) -> tuple[float, float, float, int]:
    """Return median, least and most of `times`, and their number."""
    return statistics.median(times), min(times), max(times), len(times)


def elements(collective: str, ranks: int, nbytes: int, dtype: torch.dtype) -> int:
    """Count the elements of the whole vector. Raises `ConfigError` if `nbytes` does not fit."""
    check_whole("nbytes", nbytes, 0)
    check_whole("ranks", ranks)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype must be a torch.dtype, not {short(dtype)}")
    count, left_over = divmod(nbytes, dtype.itemsize)
    if left_over:
        raise ConfigError(f"{nbytes} bytes are no whole number of {dtype} elements "
                          f"({dtype.itemsize} bytes each)")
    if collective in IN_PIECES and count % ranks:
        raise ConfigError(f"{collective} over {ranks} ranks needs pieces of equal size; "
                          f"{count} elements don't divide: take a multiple of {ranks}")
    return count


def prepared(comm: Comm, collective: str, algorithm: str, nbytes: int,
             dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", **options: Any
             ) -> Callable[[], Any]:
    """A function without arguments that makes the call; its tensors are made now, as zeros.

    nbytes: the size of the vector that textbooks call n, as in `dtlab.cost`.
    device: "meta" in the simulator, when only time matters.
    """
    check_algorithm(collective, algorithm)
    count = elements(collective, comm.size, nbytes, dtype)
    function = getattr(collectives, collective)
    wanted = inspect.signature(function).parameters
    given: dict[str, Any] = {"algorithm": algorithm, **options}
    if "x" in wanted:
        length = count // comm.size if collective in IN_PIECES else count
        given["x"] = torch.zeros(length, dtype=dtype, device=device)
    if "parts" in wanted:
        shape = (comm.size, count // comm.size)
        has_parts = "root" not in wanted or comm.rank == 0  # only a root hands out pieces
        given["parts"] = torch.zeros(shape, dtype=dtype, device=device) if has_parts else None
    if "out" in wanted:  # as torch's own, which write into a tensor that is there
        given["out"] = torch.zeros(comm.size, count // comm.size, dtype=dtype, device=device)
    return lambda: function(comm, **given)
