"""Real models as numbers, for predictions: nothing here is built."""

from __future__ import annotations

from typing import NamedTuple

from dtlab.checks import check_whole


class Shape(NamedTuple):
    """A transformer's sizes, as `source` prints them. positions: of its context. tied:
    is the output layer the table of the embedding, or has it one of its own?"""

    parameters: float
    layers: int
    hidden: int
    heads: int
    vocab: int
    positions: int
    source: str
    tied: bool = True




def gpt_shape(layers: int, hidden: int, heads: int, vocab: int = 51_200, positions: int = 2048
              ) -> Shape:
    """The shape of `GPT(GPTConfig(…))` with these sizes and a tied embedding, and of Megatron-LM's
    GPTs: layers of 12h² + 13h parameters, vocabulary and positions of h each, a last norm of 2h.

    Source: Narayanan et al. 2021, §5.1, equation 2 (which leaves out the last norm).

    >>> gpt_shape(12, 768, 12, 50_257, 1024).parameters
    124439808
    """
    for name, size in (("layers", layers), ("hidden", hidden), ("heads", heads), ("vocab", vocab),
                       ("positions", positions)):
        check_whole(name, size)
    parameters = layers * (12 * hidden**2 + 13 * hidden) + (vocab + positions + 2) * hidden
    return Shape(parameters, layers, hidden, heads, vocab, positions, "its own sizes")


_GPT2 = "Radford et al. 2019, table 2; parameters: the checkpoints"
_LLAMA = "Grattafiori et al. 2024, table 3; parameters and vocabulary: the checkpoints"

SHAPES = {
    "GPT-2 small": Shape(124_439_808, 12, 768, 12, 50_257, 1024, _GPT2),
    "GPT-2 XL": Shape(1_557_611_200, 48, 1600, 25, 50_257, 1024, _GPT2),
    "7.5 B": Shape(7.5e9, 36, 4096, 32, 51_200, 2048,
                   "Rajbhandari et al. 2020, figure 1; layers: Narayanan et al. 2021, table 1"),
    "Llama 3 8B": Shape(8_030_261_248, 32, 4096, 32, 128_256, 8192, _LLAMA, False),
    "Llama 3 70B": Shape(70_553_706_496, 80, 8192, 64, 128_256, 8192, _LLAMA, False),
    "GPT-3": Shape(175e9, 96, 12_288, 96, 50_257, 2048, "Brown et al. 2020, table 2.1"),
    "Llama 3 405B": Shape(405_853_388_800, 126, 16_384, 128, 128_256, 8192, _LLAMA, False),
}
