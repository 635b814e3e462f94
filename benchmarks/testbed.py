"""The hierarchical all-reduce against the flat ring, on real wires and as the simulator predicts.

    python benchmarks/testbed.py [--json] [--repeats 5]

Four hosts in two racks, which a thin uplink joins; one rank on each host. Both all-reduces run in
turn on the same links; each time is that of the slowest rank. Wanted: the median of the ratio of
their times is within 25 % of the ratio that `dtlab.simulate` predicts on a topology of these links.
The links are so slow that the processor, which all hosts share, doesn't matter.
It needs what `dtlab testbed` needs: Linux, and root or namespaces for everyone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

import torch

import dtlab
from dtlab.collectives import all_reduce
from dtlab.testbed import Testbed

HOSTS, RACKS = 4, 2
HOST_BPS, UPLINK_BPS = 50e6, 3.125e6  # 400 and 25 Mbit/s
ELEMENTS = 1_000_000  # of float32
OPTIONS = {"ring": {}, "hierarchical": {"group": HOSTS // RACKS}}
WITHIN = 0.25


def measure(comm: dtlab.Comm, repeats: int) -> list[dict[str, float]]:
    """Seconds of each all-reduce on this rank, again and again; all ranks begin together."""
    rows = []
    for _ in range(repeats):
        row = {}
        for name, options in OPTIONS.items():
            x = torch.ones(ELEMENTS)
            dtlab.collectives.barrier(comm)
            begun_s = comm.now()
            all_reduce(comm, x, algorithm=name, **options)
            row[name] = comm.now() - begun_s
            assert (x == comm.size).all()
        rows.append(row)
    return rows


def simulated_s(network: dtlab.topology.Topology, name: str) -> float:
    """Virtual seconds of one all-reduce."""
    def rank(comm: dtlab.Comm) -> None:
        all_reduce(comm, torch.empty(ELEMENTS, device="meta"), algorithm=name, **OPTIONS[name])

    return dtlab.simulate(rank, network=network).elapsed_s


def on_ranks(repeats: int) -> None:
    """On a host of the testbed, under torchrun: rank 0 prints the slowest rank's times."""
    values = dtlab.run(measure, repeats, trace=False).values
    if os.environ["RANK"] == "0":
        print(json.dumps([{name: max(rows[k][name] for rows in values) for name in OPTIONS}
                          for k in range(repeats)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    if "RANK" in os.environ:
        return on_ranks(asked.repeats)
    with Testbed(HOSTS, RACKS, bandwidth_Bps=HOST_BPS, uplink_Bps=UPLINK_BPS) as testbed:
        first = testbed.run(["torchrun", str(Path(__file__).resolve()), "--repeats",
                             str(asked.repeats)], timeout=300)[0]
        if first.exit_code:
            sys.exit(first.output)
        rows = json.loads(first.output.strip().splitlines()[-1])
        predicted = {name: simulated_s(testbed.topology, name) for name in OPTIONS}
    measured = {name: statistics.median(row[name] for row in rows) for name in OPTIONS}
    ratios = {"measured": statistics.median(row["ring"] / row["hierarchical"] for row in rows),
              "predicted": predicted["ring"] / predicted["hierarchical"]}
    off = ratios["measured"] / ratios["predicted"] - 1
    if asked.json:
        print(json.dumps({"measured_s": measured, "predicted_s": predicted, "ratios": ratios,
                          "off": off, "runs": rows}, indent=2))
    else:
        for name in OPTIONS:
            print(f"{name:<13} measured {measured[name]:.3f} s, predicted {predicted[name]:.3f} s")
        print(f"ring / hierarchical: measured {ratios['measured']:.2f}, predicted "
              f"{ratios['predicted']:.2f}: {off:+.0%} (wanted: within {WITHIN:.0%})")
    sys.exit(abs(off) > WITHIN)


if __name__ == "__main__":
    main()
