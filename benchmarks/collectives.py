"""`algorithm="auto"` beside torch.distributed's own collectives, over several runs, as a table.

    for p in 2 4 8; do
        dtlab bench collectives -a auto -p $p --repeats 5 --json \\
            --bytes 4KiB,64KiB,1MiB,4MiB,16MiB,64MiB > run-1-$p.json
    done                                                  # and so on, some runs: run-2-…
    python benchmarks/collectives.py run-*.json

Wanted: of each collective the geometric mean is at most 1, and no point above 1.5. One run differs
from the next by some percent, a point by up to a third; so a point's figure is the median of the
runs. `collectives.md` has what came out.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

Ratios = dict[tuple[str, int], dict[int, list[float]]]  # (collective, ranks) → bytes → one a run


def read(files: list[Path]) -> Ratios:
    """The time of auto, as a share of torch's in the same run."""
    found: Ratios = defaultdict(lambda: defaultdict(list))
    for file in files:
        for row in json.loads(file.read_text()):
            if row["algorithm"] == "auto" and row["ratio"] is not None:
                found[row["collective"], row["ranks"]][row["nbytes"]].append(row["ratio"])
    return found


def table(found: Ratios) -> str:
    """Markdown: a line for each collective and number of ranks, one for each collective's mean."""
    sizes = sorted({nbytes for points in found.values() for nbytes in points if nbytes})
    lines = ["| | ranks | " + " | ".join(f"{n >> 10:,} KiB" for n in sizes) + " | mean |",
             "|---|---" + "|---" * len(sizes) + "|---|"]
    for collective in dict.fromkeys(name for name, _ in found):
        every: list[float] = []
        for (name, ranks), points in sorted(found.items()):
            if name == collective:
                medians = {n: statistics.median(ratios) for n, ratios in points.items()}
                cells = [f"{medians[n]:.2f}" if n in medians else "" for n in sizes]
                mean = statistics.geometric_mean(medians.values())
                lines.append(f"| {name} | {ranks} | " + " | ".join(cells) + f" | {mean:.2f} |")
                every += medians.values()
        empty = " | " * (len(sizes) + 1)
        lines.append(f"| {collective} | all{empty}**{statistics.geometric_mean(every):.2f}** |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(read([Path(name) for name in sys.argv[1:]])))
