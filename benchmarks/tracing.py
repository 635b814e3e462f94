"""What tracing costs: a ring all-reduce of 1 MB, traced and not, taking turns in one run.

    python benchmarks/tracing.py [--ranks 4] [--bytes 1000000] [--repeats 400]

Wanted: under 3 %. A turn is ten calls in a row; its time is that of the slowest rank. Turns differ
by more than what tracing costs, so the figure is the median of the ratios of neighbouring turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from dtlab import Comm, run
from dtlab.collectives import all_reduce

CALLS = 10


def turns(comm: Comm, nbytes: int, repeats: int) -> list[tuple[float, float]]:
    """Seconds of each pair of turns: (traced, not traced)."""
    end = comm.endpoint  # type: ignore[attr-defined]
    x = torch.zeros(nbytes // 4)
    pairs = []
    for repeat in range(-2, repeats):
        took = {}
        for traced in (True, False) if repeat % 2 else (False, True):
            end.traced = traced
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(CALLS):
                all_reduce(comm, x, algorithm="ring")
            took[traced] = time.perf_counter() - begun
        if repeat >= 0:
            pairs.append((took[True], took[False]))
        end.begin(end.start_s)  # forget: else the trace itself would grow by millions of lines
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--bytes", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=400)
    options = parser.parse_args()
    result = run(turns, options.bytes, options.repeats, ranks=options.ranks, timeout=600)
    slowest = [tuple(map(max, zip(*turn, strict=True)))
               for turn in zip(*result.values, strict=True)]
    ratio = statistics.median(traced / bare for traced, bare in slowest)
    bare_ms = statistics.median(bare for _, bare in slowest) / CALLS * 1e3
    print(f"ring all-reduce of {options.bytes:,} bytes on {options.ranks} processes: "
          f"{bare_ms:.2f} ms a call; traced {(ratio - 1) * 100:+.1f} %")


if __name__ == "__main__":
    main()
