"""What a device does in a second: few numbers, each measured by a benchmark."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """product_flops: by precision, floating-point operations a second of a matrix product by its
    size, which is the geometric mean of its three lengths; between two sizes by interpolation over
    the logarithm, outside as at the nearest. memory_Bps: bytes a second, read or written.
    memory_bytes: how many it has. source: where the numbers are from.
    """

    name: str
    product_flops: Mapping[str, Mapping[float, float]]
    memory_Bps: float
    memory_bytes: float
    source: str = field(default="", repr=False)

    def product_s(self, flops: float, rows: float, inner: float, columns: float,
                  precision: str = "bf16") -> float:
        """Seconds for matrix products of `flops` operations in all, if a typical one has these
        lengths."""
        size, rates = math.log(rows * inner * columns) / 3, self.product_flops[precision]
        below = max((s for s in rates if math.log(s) <= size), default=min(rates))
        above = min((s for s in rates if math.log(s) >= size), default=max(rates))
        if above <= below:
            return flops / rates[below]
        share = (size - math.log(below)) / math.log(above / below)
        return flops / (rates[below] + share * (rates[above] - rates[below]))


_BEKMAN = "matrix products: Bekman, Machine Learning Engineering, table of maximum achievable " \
          "matmul FLOPS; float32 and memory: NVIDIA's data sheets"
A100 = Device("A100 80 GB", {"bf16": {4096: 271.2e12}, "float32": {4096: 19.5e12}}, 2.039e12, 80e9,
              _BEKMAN)
H100 = Device("H100 80 GB", {"bf16": {4096: 794.5e12}, "float32": {4096: 67e12}}, 3.35e12, 80e9,
              _BEKMAN)
