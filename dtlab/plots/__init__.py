"""Pictures of what happened, and of what ought to: from a Trace, a Topology or a closed form.

Each function returns a `Picture`, a matplotlib figure that shows itself in a notebook; its `alt`
says the same in words. A rank has one colour in all of them.
"""

from dtlab.plots.clocks import clocks
from dtlab.plots.comparison import predicted_vs_measured
from dtlab.plots.contest import contest_on, contest_table
from dtlab.plots.critical_batch import critical_batch
from dtlab.plots.curves import Crossover, cost_curves, crossovers
from dtlab.plots.failures import failures, useful_share
from dtlab.plots.flows import flows, link_loads
from dtlab.plots.grid import rank_grid
from dtlab.plots.histograms import server_load, staleness_histograms
from dtlab.plots.memory import memory_ledger, model_memory
from dtlab.plots.mesh import mesh
from dtlab.plots.network import topology
from dtlab.plots.overlap import overlap, step_of
from dtlab.plots.overview import before_and_after
from dtlab.plots.palette import line_style, rank_color, rank_style
from dtlab.plots.picture import Picture, styled
from dtlab.plots.placement import placement
from dtlab.plots.plans import plans
from dtlab.plots.predictions import predictions
from dtlab.plots.replicas import replicas
from dtlab.plots.ring import hash_ring
from dtlab.plots.schedule import schedule
from dtlab.plots.sharded_matrix import sharded_matrix
from dtlab.plots.stepper import stepper
from dtlab.plots.timeline import timeline
from dtlab.plots.times import fit, server_times, sweep, times_by_ranks
from dtlab.plots.training import loss_curves, loss_sweep
from dtlab.plots.training_time import training_time
from dtlab.plots.trees import double_tree

__all__ = [
    "Crossover", "Picture", "before_and_after", "clocks", "contest_on", "contest_table",
    "cost_curves", "critical_batch", "crossovers", "double_tree", "failures", "fit", "flows",
    "hash_ring", "line_style", "link_loads", "loss_curves", "loss_sweep", "memory_ledger", "mesh",
    "model_memory", "overlap", "placement", "plans", "predicted_vs_measured", "predictions",
    "rank_color", "rank_grid", "rank_style", "replicas", "schedule", "server_load",
    "server_times", "sharded_matrix", "staleness_histograms", "step_of", "stepper", "styled",
    "sweep", "timeline", "times_by_ranks", "topology", "training_time",
    "useful_share",
]
