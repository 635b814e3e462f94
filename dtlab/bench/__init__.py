"""Measurements that compare: each contestant beside its peer, in the same run, taking turns."""

from dtlab.bench.collectives import Row, measure
from dtlab.bench.launch import Start, measure_launch
from dtlab.bench.parameter_server import RoundTrip, measure_ps

__all__ = ["Row", "Start", "RoundTrip", "measure", "measure_launch", "measure_ps"]
