"""A deterministic simulator of clusters, in virtual time."""

from dtlab.simulator.replay import Moving, Stretch, replay
from dtlab.simulator.simulation import simulate, simulate_shared

__all__ = ["Moving", "Stretch", "replay", "simulate", "simulate_shared"]
