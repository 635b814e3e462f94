"""Measurements that compare: each contestant beside its peer, in the same run, taking turns."""

from dtlab.bench.collectives import Row, measure
from dtlab.bench.launch import Start, measure_launch
from dtlab.bench.parallel import Step, measure_parallel
from dtlab.bench.parameter_server import RoundTrip, measure_ps

__all__ = ["Row", "Start", "RoundTrip", "Step", "measure", "measure_launch", "measure_parallel",
           "measure_ps"]
