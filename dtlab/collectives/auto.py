"""algorithm="auto": the algorithm that costs least, as far as α, β and γ can tell."""

from __future__ import annotations

from dtlab import cost
from dtlab.collectives.registry import IMPLEMENTATIONS
from dtlab.machine import Machine


@cost.remembered
def cheapest(collective: str, ranks: int, nbytes: int, itemsize: int, machine: Machine) -> str:
    """The algorithm with the least predicted time; of equals, that with the shorter path, and of
    those the first in the registry. What has no closed form is never chosen."""
    def seconds(name: str) -> tuple[float, float]:
        asked = collective, name, ranks, nbytes, machine, itemsize
        return cost.predicted_s(*asked), cost.bounds_s(*asked)[0]

    predicted = [name for name in IMPLEMENTATIONS[collective] if cost.has_form(collective, name)]
    return min(predicted, key=seconds)
