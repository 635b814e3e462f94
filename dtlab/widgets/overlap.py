"""The communication that overlap hides, by strategy, bucket and network."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from dtlab import cost
from dtlab.collectives import barrier
from dtlab.comm import Comm
from dtlab.parallel import DataParallel, charge_compute
from dtlab.parallel.data import STRATEGIES
from dtlab.plots import Picture
from dtlab.plots.overlap import overlap
from dtlab.simulator import simulate
from dtlab.topology import uniform
from dtlab.trace import Trace
from dtlab.units import bytes_text, seconds_text
from dtlab.widgets.explorer import Explorer, choice, dropdown

LAYERS, LAYER_BYTES = 12, 1 << 20  # of the model: 12 MiB of gradients
ALPHA = 10e-6
BUCKETS = [k for k in range(1, LAYERS + 1) if LAYERS % k == 0]


def train_step(comm: Comm, strategy: str, buckets: int, forward_s: float = 100e-6,
               device: str = "meta") -> None:
    """Run forward and backward of `LAYERS` linear layers, whose gradients leave in `buckets`.

    In the simulator a layer takes `forward_s` forward and twice that backward. device: "meta" is
    without data, "cpu" computes.
    """
    width = int((LAYER_BYTES / 4) ** 0.5)
    with torch.device(device):
        layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        x = torch.ones(256, width)
    model = DataParallel(layers, comm, strategy, LAYERS // buckets * LAYER_BYTES, "ring")
    charge_compute(comm, dict.fromkeys(layers, forward_s))
    barrier(comm)
    model(x).sum().backward()


class OverlapExplorer(Explorer):
    """`plots.overlap` of a simulated step, with controls; above it, on the same axis, a measured
    one of the same strategy, if `measured` has its trace.

    forward_s: of a layer; backward takes twice as long. Raises `ConfigError` for what the controls
    don't offer.
    """

    def __init__(self, measured: Mapping[str, Trace] | None = None, strategy: str = "overlap",
                 buckets: int = 4, ranks: int = 4, bandwidth_Bps: float = 10e9,
                 forward_s: float = 100e-6):
        self.measured, self.forward_s = dict(measured or {}), forward_s
        self.strategy = dropdown("strategy", STRATEGIES, strategy, width="260px")
        self.buckets = choice("buckets", [(f"{k} of {bytes_text(LAYERS // k * LAYER_BYTES)}", k)
                                          for k in BUCKETS], buckets)
        self.ranks = choice("ranks", [(str(p), p) for p in (2, 4, 8)], ranks, width="220px")
        self.speed = choice("a link's bandwidth", [(f"{bytes_text(b)}/s", b) for b in (
            1e9, 2e9, 5e9, 10e9, 20e9, 50e9)], bandwidth_Bps)  # each a stop of its slider
        super().__init__([self.strategy, self.ranks], [self.buckets, self.speed])

    def _draw(self, strategy: str, ranks: int, buckets: int, bandwidth: float) -> Picture:
        trace = simulate(train_step, strategy, buckets, self.forward_s,
                         network=uniform(ranks, ALPHA, bandwidth)).trace
        backward_s, nbytes = 2 * self.forward_s * LAYERS, LAYERS * LAYER_BYTES
        sent_together = {"parameter": LAYERS, "flat": 1}.get(strategy, buckets)
        numbers = ranks, ALPHA, 1 / bandwidth
        form = cost.exposed_s(backward_s, nbytes, sent_together, *numbers,
                              overlap=strategy == "overlap")
        best = cost.best_buckets(backward_s, nbytes, LAYERS, *numbers)
        note = (f"closed form: {seconds_text(form)} · best with overlap: {best} "
                f"{'bucket' if best == 1 else 'buckets'}, "
                f"{seconds_text(cost.exposed_s(backward_s, nbytes, best, *numbers))}")
        rows = {"measured": self.measured[strategy]} if strategy in self.measured else {}
        return overlap({**rows, "simulated": trace}, note=note)
