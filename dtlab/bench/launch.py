"""The time until N processes form a group, meet at one barrier, and are gone."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import cloudpickle
import torch.distributed as dist
import torch.multiprocessing

from dtlab.bench.calls import spread
from dtlab.checks import check_whole
from dtlab.errors import DtlabError
from dtlab.processes import run

OURS = "dtlab.run"
FIRST = "dtlab.run, first call"
_FIRST_CALL = """
import sys, time
import dtlab
from dtlab.bench.launch import meet
begun = time.perf_counter()
dtlab.run(meet, ranks=int(sys.argv[1]), echo=False)
print(time.perf_counter() - begun)
"""


class Start(NamedTuple):
    """One way of starting ranks."""

    launcher: str
    ranks: int
    time_s: float  # median
    fastest_s: float
    slowest_s: float
    repeats: int
    ratio: float  # time / dtlab.run's, measured in turn with it: over 1 is slower than dtlab


class ByValue:
    """A function that a rank receives as code, so that starting it imports no module of ours."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.code = cloudpickle.dumps(function)

    def __reduce__(self) -> tuple[Any, ...]:
        return cloudpickle.loads, (self.code,)

    def __call__(self, *args: Any) -> None:
        cloudpickle.loads(self.code)(*args)


# Gloo breaks if a rank leaves while others still connect: ranks meet before they leave. cloudpickle
# sends a lambda as code.
meet = ByValue(lambda *comm: dist.barrier())


def _join_by_spawn() -> ByValue:
    """Under spawn: form the group by hand, as torch's tutorial does."""

    def join(rank: int, ranks: int, meeting_point: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank,
                                world_size=ranks)
        dist.barrier()
        dist.destroy_process_group()

    return ByValue(join)


def by_dtlab(ranks: int) -> None:
    run(meet, ranks=ranks, echo=False)


def by_spawn(ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_join_by_spawn(), (ranks, os.path.join(folder, "meet")), ranks)


def by_accelerate(ranks: int) -> None:
    """Start ranks by Accelerate's launcher for tests: it forks the caller, and forms the group."""
    from accelerate import debug_launcher

    debug_launcher(meet, num_processes=ranks)


LAUNCHERS: dict[str, Callable[[int], None]] = {
    OURS: by_dtlab,
    "torch.multiprocessing.spawn": by_spawn,
    "accelerate.debug_launcher": by_accelerate,
}


def first_call_s(ranks: int) -> float:
    """Seconds that `run` takes in a fresh interpreter, its import apart: the server starts too."""
    done = subprocess.run([sys.executable, "-c", _FIRST_CALL, str(ranks)], capture_output=True,
                          text=True)
    if done.returncode != 0:
        raise DtlabError(f"the first call of run failed:\n{done.stderr}")
    return float(done.stdout)


def measure_launch(ranks: int = 4, repeats: int = 5,
                   watched: Callable[[list[int]], Iterable[int]] = iter) -> list[Start]:
    """Time each launcher, taking turns, each warmed by one call; and our first call of all.

    Accelerate is left out where it is not installed. watched: goes through the turns, as tqdm does.
    """
    check_whole("repeats", repeats)
    launchers = dict(LAUNCHERS)
    times: dict[str, list[float]] = {}
    for turn in watched(list(range(-1, repeats))):
        for name, launch in list(launchers.items()):
            begun = time.perf_counter()
            try:
                launch(ranks)
            except ImportError:
                del launchers[name]
                continue
            if turn >= 0:
                times.setdefault(name, []).append(time.perf_counter() - begun)
    times[FIRST] = [first_call_s(ranks) for _ in range(min(repeats, 3))]
    ours_s = statistics.median(times[OURS])
    return [Start(name, ranks, *spread(took), statistics.median(took) / ours_s)
            for name, took in times.items()]
