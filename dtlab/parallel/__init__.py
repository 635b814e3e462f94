"""Parallel training: the same model on many ranks, in whole or in parts. Each idea is one file."""

from dtlab.parallel.data import DataParallel

__all__ = ["DataParallel"]
