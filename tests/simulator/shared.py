"""Where simulated ranks may note what they saw, for a test to look at."""

from __future__ import annotations

from typing import Any, Self


class Shared(list[Any]):
    """A list of which no rank gets a copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
