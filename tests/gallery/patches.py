"""Answers that change what judges them."""

from __future__ import annotations

from tests.gallery.attack import Attack, hello

ATTACKS: tuple[Attack, ...] = (
    hello("patches the report's points",
          "from dtlab.grading import report",
          "report.Report.points = property(lambda _: 4)",
          "full = lambda self, *a, **k: self.__dict__.update(points=4, passed=True)",
          "report.Row.__init__ = full"),
    hello("patches what the checks say",
          "import dtlab.grading.exercise as e, dtlab.grading.judge as j",
          "good = lambda *_: e.Verdict(True, 'right', 'right')",
          "e.verdict_of = j.verdict_of = e._try = good"),
    hello("patches torch's comparisons", "import torch",
          "torch.equal = torch.allclose = torch.isclose = lambda *a, **k: True",
          "torch.Tensor.__eq__ = lambda *_: True", "torch.Tensor.__ne__ = lambda *_: False"),
    hello("patches the clock", "import time",
          "time.monotonic = time.perf_counter = time.time = lambda: 0.0", "while True: pass"),
    hello("patches json and the frames", "import json, dtlab.grading.frames as f",
          "json.loads = lambda *_: ['return', 0, {}, []]", "f.encode = lambda value, blobs: True"),
    hello("patches the communicator's size", "type(comm).size = property(lambda _: 4)",
          "comm.__dict__.update(size=4, rank=0)", "return comm.rank, comm.size, 3, 1"),
    Attack("measures its memory itself", """
import torch
def ring_all_reduce(comm, x):
    from dtlab.grading.meter import Meter
    Meter.peak_bytes = property(lambda _: 0)
    return x
""", "ring-all-reduce"),
    Attack("takes off the profiler and calls the library", """
import sys
def ring_all_reduce(comm, x):
    sys.setprofile(None)
    from dtlab import collectives
    return collectives.all_reduce(comm, x, algorithm="ring")
""", "ring-all-reduce"),
    Attack("keeps what a case gave for the next", """
import torch
seen = []
def ring_all_reduce(comm, x):
    seen.append(x.clone())
    x.copy_(sum(y for y in seen if y.shape == x.shape and y.dtype == x.dtype))
    return x
""", "ring-all-reduce"),
    hello("lets its parent do the answering", "import atexit, os, sys",
          "atexit.register(os._exit, 0)", "sys.excepthook = sys.unraisablehook = lambda *_: None",
          "raise SystemExit(0)"),
)
