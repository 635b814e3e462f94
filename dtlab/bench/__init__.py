"""Measurements that compare: each contestant beside its peer, in the same run, taking turns."""

from dtlab.bench.collectives import Row, measure
from dtlab.bench.launch import Start, measure_launch

__all__ = ["Row", "Start", "measure", "measure_launch"]
