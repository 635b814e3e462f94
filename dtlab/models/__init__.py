"""Small models and real data to train them on. They know nothing of parallelism."""

from dtlab.models.digits import Digits, digits
from dtlab.models.mlp import MLP, Parameters

__all__ = ["Digits", "digits", "MLP", "Parameters"]
