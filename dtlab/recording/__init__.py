"""Runs recorded for a picture: simulated, and kept step by step as what `dtlab.plots` draws."""

from dtlab.recording.clock_run import PACES, ClockRun, watch_clocks
from dtlab.recording.frames import Arrow, CollectiveFrame
from dtlab.recording.link_history import LinkHistory
from dtlab.recording.placements import Placements, placements
from dtlab.recording.recorder import frames_of, stepper_frames
from dtlab.recording.replica_run import ReplicaRun, count_pushes, islands, replica_run

__all__ = [
    "PACES", "Arrow", "ClockRun", "CollectiveFrame", "LinkHistory", "Placements", "ReplicaRun",
    "count_pushes", "frames_of", "islands", "placements", "replica_run", "stepper_frames",
    "watch_clocks",
]
