"""A deterministic simulator of clusters, in virtual time."""

from dtlab.simulator.simulate import simulate

__all__ = ["simulate"]
