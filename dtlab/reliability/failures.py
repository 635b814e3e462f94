"""When the nodes of a job fail."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from dtlab.checks import check_amount, check_choice, check_positive, check_whole, short
from dtlab.cost.failures import DAY_S
from dtlab.errors import ConfigError

MOST_NODES = 1_000_000
LEAST_SHAPE = 0.1  # with less, nearly all of the nodes that come back fail at once
SPREADS = ("exponential", "uniform", "weibull")


@dataclass(frozen=True)
class Failures:
    """Failures that strike a job's nodes, whether they compute or wait.

    per_node_day: mean failures of one node a day.
    spread: of a node's time to failure about its mean: "exponential" (constant rate), "uniform"
        (0 to twice the mean), "weibull" (`shape`, 0.1 or more; below 1 young nodes fail more). A
        node that comes back is new; those in place at the start have an age.
    rack, rack_per_day: nodes of a rack, and how often a day its switch fails, which takes them all.
    bad, bad_factor, exclude_after: the first `bad` nodes fail `bad_factor` times as often as the
        rest. A bad node is replaced by a good one after `exclude_after` failures; None: never.
    at: failures to play besides, each (second, places): a published log, or a case to look at.
    """

    per_node_day: float = 0.0
    spread: str = "exponential"
    shape: float = 0.7
    rack: int = 1
    rack_per_day: float = 0.0
    bad: int = 0
    bad_factor: float = 100.0
    exclude_after: int | None = None
    at: Sequence[tuple[float, Sequence[int]]] = ()

    def __post_init__(self) -> None:
        for name in ("per_node_day", "rack_per_day"):
            check_amount(name, getattr(self, name))
        for name in ("shape", "bad_factor"):
            check_positive(name, getattr(self, name))
        if self.shape < LEAST_SHAPE:
            raise ConfigError(f"shape must be {LEAST_SHAPE} or more, not {short(self.shape)}")
        check_whole("rack", self.rack)
        check_whole("bad", self.bad, 0, MOST_NODES)
        if self.exclude_after is not None:
            check_whole("exclude_after", self.exclude_after)
        check_choice("spread", self.spread, SPREADS)
        try:
            for at_s, places in self.at:
                check_amount("a second of at", at_s)
                for place in places:
                    check_whole("a place of at", place, least=0)
        except (TypeError, ValueError):
            raise ConfigError("at is a list of (second, places), such as [(60, [0, 3])], not "
                              f"{short(self.at)}") from None

    def expected(self, nodes: int, duration_s: float) -> float:
        """The mean number of failures that strike a job of `nodes` in `duration_s` seconds."""
        rate = self.per_node_day * (nodes + min(self.bad, nodes) * (self.bad_factor - 1))
        return ((rate + self.rack_per_day * math.ceil(nodes / self.rack)) * duration_s / DAY_S
                + len(self.at))

    def mean_s(self, bad: bool) -> float:
        """Return the mean lifetime of a node."""
        return DAY_S / (self.per_node_day * (self.bad_factor if bad else 1) or 1e-99)

    def lifetime_s(self, draws: random.Random, bad: bool) -> float:
        """Draw the lifetime of a new node."""
        mean_s = self.mean_s(bad)
        share = 1 - draws.random()  # above 0, at most 1
        if self.spread == "uniform":
            return 2 * mean_s * share
        if self.spread == "weibull":
            inverse = 1 / self.shape
            return mean_s * math.pow(-math.log(share), inverse) / math.gamma(1 + inverse)
        return -mean_s * math.log(share)

    def residual_s(self, draws: random.Random, bad: bool) -> float:
        """Draw how long a node lasts that was in use long before the start, so that failures come
        at their mean rate from the first day on: a moment falls into a life as often as that is
        long, and anywhere in it."""
        if self.spread == "exponential":  # has no memory
            return self.lifetime_s(draws, bad)
        mean_s, left = self.mean_s(bad), 1 - draws.random()
        if self.spread == "uniform":
            return 2 * mean_s * math.sqrt(draws.random()) * left
        inverse = 1 / self.shape
        life = math.pow(draws.gammavariate(1 + inverse, 1.0), inverse) / math.gamma(1 + inverse)
        return mean_s * life * left
