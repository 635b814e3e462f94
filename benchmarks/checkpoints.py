"""How long a save stops training: `parallel.save` that waits, one that writes beside training, and
a copy in the neighbour's memory, beside torch's own asynchronous checkpoint of the same state.

    python benchmarks/checkpoints.py [--ranks 2] [--hidden 1024] [--repeats 5]

Prints medians in milliseconds, each as a ratio to the save that waits, all in one run. A file
system's cache takes most of a write here; slower disks change the first figure most.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import dtlab
from dtlab.models import MLP
from dtlab.parallel import DataParallel, MemoryCheckpoint, save


def measure(comm: dtlab.Comm, folder: Path, hidden: int, repeats: int) -> dict[str, list[float]]:
    """Seconds for which each way stops this rank, of `repeats` saves with a step between them."""
    module = MLP((64, hidden, hidden, 10)).module()
    model = DataParallel(module, comm)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    memory, pending = MemoryCheckpoint(), {"work": None, "future": None}
    inputs = torch.randn(32, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    def beside() -> None:
        pending["work"] = save(folder / "beside", model, optimizer, wait=False)

    def torchs() -> None:
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        with warnings.catch_warnings(action="ignore"):  # that it replaces the one before
            pending["future"] = dcp.async_save(state, checkpoint_id=str(folder / "torch"))

    ways: dict[str, Any] = {
        "waits": lambda: save(folder / "waits", model, optimizer),
        "writes beside training": beside,
        "neighbour's memory": lambda: memory.save(model, optimizer),
        "torch.distributed.checkpoint.async_save": torchs,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    step()
    for _ in range(repeats + 1):  # the first of each is not counted
        for name, way in ways.items():
            comm.split(0)  # all begin together
            begun_s = comm.now()
            way()
            seconds[name].append(comm.now() - begun_s)
            if pending["work"] is not None:
                pending["work"].wait()
                pending["work"] = None
            if pending["future"] is not None:
                pending["future"].result()
                pending["future"] = None
            step()
    return {name: each[1:] for name, each in seconds.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        values = dtlab.run(measure, Path(folder), given.hidden, given.repeats, ranks=given.ranks,
                           timeout=600).values
    medians = {name: statistics.median(max(each) for each in zip(*(v[name] for v in values),
                                                                  strict=True))
               for name in values[0]}
    for name, median_s in medians.items():
        print(f"{name:42} {1000 * median_s:8.1f} ms  {median_s / medians['waits']:5.2f}")


if __name__ == "__main__":
    main()
