"""Real models as numbers, for predictions: nothing here is built."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """A transformer's sizes, as `source` prints them. positions: it was trained on so many."""

    parameters: float
    layers: int
    hidden: int
    heads: int
    vocab: int
    positions: int
    source: str


_GPT2 = "Radford et al. 2019, table 2; parameters: the checkpoints"
_LLAMA = "Grattafiori et al. 2024, table 3; parameters and vocabulary: the checkpoints"

SHAPES = {
    "GPT-2 small": Shape(124_439_808, 12, 768, 12, 50_257, 1024, _GPT2),
    "GPT-2 XL": Shape(1_557_611_200, 48, 1600, 25, 50_257, 1024, _GPT2),
    "7.5 B": Shape(7.5e9, 36, 4096, 32, 51_200, 2048,
                   "Rajbhandari et al. 2020, figure 1; layers: Narayanan et al. 2021, table 1"),
    "Llama 3 8B": Shape(8_030_261_248, 32, 4096, 32, 128_256, 8192, _LLAMA),
    "Llama 3 70B": Shape(70_553_706_496, 80, 8192, 64, 128_256, 8192, _LLAMA),
    "GPT-3": Shape(175e9, 96, 12_288, 96, 50_257, 2048, "Brown et al. 2020, table 2.1"),
    "Llama 3 405B": Shape(405_853_388_800, 126, 16_384, 128, 128_256, 8192, _LLAMA),
}
