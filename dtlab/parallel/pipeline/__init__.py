"""Pipelines: every schedule as data, and one executor."""

from dtlab.parallel.pipeline.action import Action
from dtlab.parallel.pipeline.executor import Pipeline
from dtlab.parallel.pipeline.generators import (
    dualpipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    naive,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from dtlab.parallel.pipeline.schedule import Schedule
from dtlab.parallel.pipeline.stages import Stage, cut, gpt_layers
from dtlab.parallel.pipeline.timing import Timing

__all__ = ["Action", "Pipeline", "Schedule", "Stage", "Timing", "cut", "dualpipe_v", "gpipe",
           "gpt_layers", "interleaved", "looped_bfs", "naive", "one_f_one_b", "zb_h1", "zb_h2",
           "zb_v"]
