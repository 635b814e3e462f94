"""The cost of failures for a long job: a simulation in which every rank-second is accounted for.

`goodput` plays the failures of weeks on thousands of nodes in a second; the closed forms of
`dtlab.cost` stand beside it, where they hold.
"""

from dtlab.reliability.account import ANSWERS, Goodput, goodput
from dtlab.reliability.failures import Failures
from dtlab.reliability.job import KINDS, Interval

__all__ = ["ANSWERS", "KINDS", "Failures", "Goodput", "Interval", "goodput"]
