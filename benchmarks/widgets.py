"""How long an explorer takes to answer: from the moved control to the new picture. Limit: 150 ms.

    python benchmarks/widgets.py

Every control is moved to up to six of its values, one after another. CPU times, which depend less
than wall-clock times on what else the machine does. A player answers in the page, which
`make check-site` times.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import ipywidgets

sys.path.insert(0, str(Path(__file__).parent.parent))
from dtlab.widgets.explorer import Explorer
from tests.widgets.test_widgets import MAKE

LIMIT_MS = 150.0
RUNS_PROCESSES = {"RankGrid"}


def answers_ms(explorer: Explorer) -> list[float]:
    """Milliseconds of CPU for each answer."""
    times = []
    for control in explorer.controls:
        if isinstance(control, (ipywidgets.SelectionSlider, ipywidgets.Dropdown)):
            values = [each[1] if isinstance(each, tuple) else each for each in control.options]
            for value in values[:6]:
                begin = time.process_time()
                control.value = value
                times.append((time.process_time() - begin) * 1e3)
    return times


def main() -> int:
    """Print the table; 1 if a median exceeds the limit."""
    print(f"{'':28} {'answers':>8} {'median':>10} {'most':>10}")
    slow = 0
    for name, make in MAKE.items():
        if name not in RUNS_PROCESSES and (times := answers_ms(make())):
            median = statistics.median(times)
            print(f"{name:28} {len(times):8} {median:7.0f} ms {max(times):7.0f} ms", flush=True)
            slow += median > LIMIT_MS
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
