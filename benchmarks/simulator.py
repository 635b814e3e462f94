"""What a simulated message costs, and how large a cluster one core can simulate.

    python benchmarks/simulator.py [--json]

An all-reduce by the ring over p ranks, with tensors that hold no data: 2p(p−1) messages. Wanted:
1024 ranks under 10 s and 2 GB on one core, and a time per message that is about the same at 64 and
at 1024. Then all-reduces of 100 MB on clusters of thousands: each wanted under its limit, and
under 4 GB. Each figure is the best of a few, in processor time; beside it stands a loop of plain
Python measured in the same minute, so that machines can be compared.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

import torch

from dtlab import Comm, simulate
from dtlab.collectives import all_reduce
from dtlab.topology import Topology, fat_tree, torus, uniform

REPEATS = {64: 30, 256: 3, 1024: 2}
LARGE: dict[str, tuple[str, Topology]] = {  # the limit in seconds is in the name
    "seconds_torus_68x32_under_10": ("torus", torus(68, 32)),
    "seconds_halving_doubling_4096_under_20": ("halving_doubling", uniform(4096, 1e-5, 1e9)),
    "seconds_ring_1024_fat_tree_under_20": ("ring", fat_tree(16, oversubscription=4)),
}


def all_reduce_s(network: Topology, elements: int, algorithm: str) -> tuple[float, int]:
    """Processor seconds of one simulated all-reduce of float32, and how many messages it took."""
    def rank(comm: Comm) -> None:
        all_reduce(comm, torch.empty(elements, device="meta"), algorithm=algorithm)

    began = time.process_time()
    result = simulate(rank, network=network)
    return time.process_time() - began, result.trace.messages()


def plain_python_s(steps: int = 1_000_000) -> float:
    """Processor seconds of a loop that any machine can be compared by."""
    began, total = time.process_time(), 0
    for step in range(steps):
        total += step & 3
    return time.process_time() - began


def measure() -> dict[str, float]:
    """All figures: microseconds a message at each size, their ratio, seconds, memory."""
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for ranks, repeats in REPEATS.items():
        network = uniform(ranks, 1e-5, 1e9)
        seconds, messages = min(all_reduce_s(network, 1000 * ranks, "ring") for _ in range(repeats))
        figures[f"us_per_message_{ranks}"] = seconds / messages * 1e6
    figures["ratio_1024_to_64"] = figures["us_per_message_1024"] / figures["us_per_message_64"]
    figures["seconds_1024_under_10"] = seconds
    for name, (algorithm, network) in LARGE.items():
        figures[name], _ = all_reduce_s(network, 25_000_000, algorithm)
    figures["peak_MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    figures["plain_python_ns_per_step"] = min(plain_python_s() for _ in range(5)) * 1e3
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    figures = measure()
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:40} {value:10.2f}")


if __name__ == "__main__":
    main()
