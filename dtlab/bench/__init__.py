"""Measurements that compare: each contestant beside its peer, in the same run, taking turns."""

from dtlab.bench.collectives import CollectiveTime, measure
from dtlab.bench.launch import Start, measure_launch
from dtlab.bench.parallel import StepTime, measure_parallel
from dtlab.bench.parameter_server import RoundTrip, measure_ps

__all__ = ["CollectiveTime", "RoundTrip", "Start", "StepTime", "measure", "measure_launch",
           "measure_parallel", "measure_ps"]
