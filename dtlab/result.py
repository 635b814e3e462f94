"""The result of a run, real or simulated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dtlab.checks import short
from dtlab.trace import Trace


@dataclass
class Result:
    """`values[r]`, `output[r]`: what rank r returned and printed. `elapsed_s`: from the moment that
    all ranks were ready until the last had returned (virtual seconds if simulated)."""

    values: list[Any]
    elapsed_s: float
    trace: Trace
    output: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.values)

    def __repr__(self) -> str:
        shown = ", ".join(short(value, 60) for value in self.values[:4])
        more = ", …" if len(self.values) > 4 else ""
        clock = "virtual s" if self.trace.virtual else "s"
        return (f"Result({self.ranks} ranks, {self.elapsed_s:.6g} {clock}, "
                f"{self.trace.messages()} messages, {self.trace.sent_bytes():,} bytes; "
                f"values [{shown}{more}])")
