"""The same pictures, with handles: ipywidgets around `dtlab.plots`.

An explorer shows SVG that it has drawn before or draws in well under 150 ms; a player's page draws
the moments that Python has computed. The same in words stands below the picture. All work by
keyboard. None starts a process unless its Run button is pressed; Stop, beside it, ends what it
began. `.static()` gives the picture as `dtlab.plots` draws it, to stand beside the widget.
"""

from dtlab.widgets.algorithm_topology import AlgorithmTopologyExplorer
from dtlab.widgets.alpha_beta import AlphaBetaExplorer
from dtlab.widgets.clocks import ClockExplorer
from dtlab.widgets.critical_batch import CriticalBatchExplorer
from dtlab.widgets.failures import FailureExplorer
from dtlab.widgets.memory import MemoryExplorer
from dtlab.widgets.overlap import OverlapExplorer
from dtlab.widgets.placement import PlacementExplorer
from dtlab.widgets.plans import PlanExplorer
from dtlab.widgets.ranks import RankGrid
from dtlab.widgets.replicas import ReplicaExplorer
from dtlab.widgets.schedule import ScheduleExplorer
from dtlab.widgets.sharded_matrix import ShardedMatrixExplorer
from dtlab.widgets.stepper import Stepper
from dtlab.widgets.timeline import TimelineExplorer
from dtlab.widgets.topology import TopologyExplorer
from dtlab.widgets.training_time import TrainingTimeExplorer

__all__ = [
    "AlgorithmTopologyExplorer", "AlphaBetaExplorer", "ClockExplorer", "CriticalBatchExplorer",
    "FailureExplorer", "MemoryExplorer", "OverlapExplorer", "PlacementExplorer", "PlanExplorer",
    "RankGrid", "ReplicaExplorer", "ScheduleExplorer", "ShardedMatrixExplorer", "Stepper",
    "TimelineExplorer", "TopologyExplorer", "TrainingTimeExplorer",
]
