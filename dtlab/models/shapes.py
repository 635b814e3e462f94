"""Real models as numbers, for predictions: nothing here is built."""

from __future__ import annotations

from typing import NamedTuple

from dtlab.checks import check_amount, check_whole
from dtlab.errors import ConfigError

ATTENTION = ("flash", "stored")  # does it keep its scores for backward?


class Experts(NamedTuple):
    """A mixture of experts instead of one MLP: `number` of them with an MLP of `width`, of which
    each token uses the `top` best and all `shared` ones. dense_layers: how many layers have one MLP
    of the shape's `mlp_width` as before. capacity: an expert takes at most that many times its
    average of tokens, and room for as many is computed and sent; 0: what comes, evenly spread.
    biased: has each expert a number that balances how often it is chosen?"""

    number: int
    top: int
    width: int
    shared: int = 0
    dense_layers: int = 0
    capacity: float = 0.0
    biased: bool = False


class Latent(NamedTuple):
    """Latent attention (DeepSeek-AI 2024): queries through a matrix of rank `query_rank`, keys and
    values through one of `rank`. A head's queries and keys have `width` elements and `rotary` with
    positions, which all heads' keys share; its values have `value_width`."""

    query_rank: int = 1536
    rank: int = 512
    width: int = 128
    rotary: int = 64
    value_width: int = 128


class Shape(NamedTuple):
    """A transformer's sizes, as `source` prints them. positions: of its context. tied: is the
    output layer the table of the embedding, or has it one of its own? kv_heads: of keys and values,
    None for as many as `heads`. mlp_width: of one MLP, None for 4·hidden. gated: has an MLP three
    matrices (SwiGLU) or two (GELU)? experts, latent: None for one MLP, and for ordinary attention.
    attention: "flash" reads and keeps queries, keys, values and outputs, and skips what a causal
    mask hides; "stored" computes all scores and keeps them, as Megatron-LM did in 2021."""

    parameters: float
    layers: int
    hidden: int
    heads: int
    vocab: int
    positions: int
    source: str
    tied: bool = True
    kv_heads: int | None = None
    mlp_width: int | None = None
    gated: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    attention: str = "flash"

    @property
    def width(self) -> int:
        """Of one MLP."""
        return 4 * self.hidden if self.mlp_width is None else self.mlp_width

    @property
    def queries(self) -> int:
        """Elements of all heads' queries for one token."""
        return self.heads * (self.latent.width + self.latent.rotary) if self.latent else self.hidden

    @property
    def keys(self) -> int:
        """Elements of all heads' keys for one token, as attention's kernel reads them."""
        return self.queries if self.latent else self.hidden * self.grouped // self.heads

    @property
    def values(self) -> int:
        """Elements of all heads' values for one token, likewise."""
        return self.heads * self.latent.value_width if self.latent else self.keys

    @property
    def attended(self) -> int:
        """Elements of all heads' outputs for one token."""
        return self.heads * self.latent.value_width if self.latent else self.hidden

    @property
    def grouped(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def attention_parameters(self) -> int:
        """Of the matrices of one layer's attention."""
        h, latent = self.hidden, self.latent
        if latent is None:
            return h * (self.queries + self.keys + self.values) + self.attended * h
        return (h * latent.query_rank + latent.query_rank * self.queries
                + h * (latent.rank + latent.rotary)
                + latent.rank * self.heads * (latent.width + latent.value_width)
                + self.attended * h)

    @property
    def expert_parameters(self) -> int:
        """Of all routed experts of all layers."""
        if self.experts is None:
            return 0
        layers = self.layers - self.experts.dense_layers
        return layers * self.experts.number * self.mlp_parameters(self.experts.width)

    def mlp_parameters(self, width: int) -> int:
        """Of the matrices of an MLP of this width."""
        return (3 if self.gated else 2) * self.hidden * width


def gpt_shape(layers: int, hidden: int, heads: int, vocab: int = 51_200, positions: int = 2048,
              attention: str = "stored") -> Shape:
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
    return Shape(parameters, layers, hidden, heads, vocab, positions, "its own sizes",
                 attention=attention)


def llama_shape(layers: int, hidden: int, heads: int, mlp_width: int, vocab: int,
                positions: int = 8192, *, kv_heads: int | None = None, tied: bool = False,
                experts: Experts | None = None, latent: Latent | None = None,
                source: str = "its own sizes") -> Shape:
    """The shape of a model built as Llama, Mixtral and DeepSeek are: RMSNorm, rotary positions,
    gated MLPs, no biases; its parameters counted. Raises `ConfigError` unless kv_heads divides
    heads, and heads divides hidden.

    Source: Touvron et al. 2023; Jiang et al. 2024; DeepSeek-AI 2024 (without the extra prediction
    head).

    >>> llama_shape(32, 4096, 32, 14_336, 128_256, kv_heads=8).parameters
    8030261248
    """
    for name, size in (("layers", layers), ("hidden", hidden), ("heads", heads),
                       ("mlp_width", mlp_width), ("vocab", vocab), ("positions", positions),
                       ("kv_heads", heads if kv_heads is None else kv_heads)):
        check_whole(name, size)
    if experts is not None:
        for name, size, least, most in (
                ("experts.number", experts.number, 1, 100_000),
                ("experts.top", experts.top, 1, experts.number),
                ("experts.width", experts.width, 1, 10_000_000),
                ("experts.shared", experts.shared, 0, 1000),
                ("experts.dense_layers", experts.dense_layers, 0, layers - 1)):
            check_whole(name, size, least, most)
        check_amount("experts.capacity", experts.capacity)
    for name, size in (latent or Latent())._asdict().items():
        check_whole(f"latent.{name}", size)
    if kv_heads is not None and heads % kv_heads:
        raise ConfigError(f"{kv_heads} heads of keys and values can't be shared equally by {heads} "
                          f"heads")
    if latent is None and hidden % heads:
        raise ConfigError(f"a hidden size of {hidden} can't be cut into {heads} heads")
    shape = Shape(0, layers, hidden, heads, vocab, positions, source, tied, kv_heads, mlp_width,
                  True, experts, latent)
    dense = layers if experts is None else experts.dense_layers
    parameters = (layers * (shape.attention_parameters + 2 * hidden)
                  + dense * shape.mlp_parameters(mlp_width) + shape.expert_parameters
                  + (1 if tied else 2) * vocab * hidden + hidden)
    if latent is not None:
        parameters += layers * (latent.query_rank + latent.rank)  # norms
    if experts is not None:
        parameters += (layers - dense) * (
            experts.number * (hidden + experts.biased)
            + experts.shared * shape.mlp_parameters(experts.width))
    return shape._replace(parameters=parameters)


_GPT2 = "Radford et al. 2019, table 2; parameters: the checkpoints"
_GPT3 = "Brown et al. 2020, table 2.1, with the parameters that it prints"
_LLAMA2 = "Touvron et al. 2023, and its checkpoints"
_LLAMA3 = "Grattafiori et al. 2024, table 3; vocabulary: the checkpoints"
_DEEPSEEK = "DeepSeek-AI 2024, §4.2, without the extra prediction head; vocabulary: the checkpoint"

SHAPES = {
    "GPT-2 small": Shape(124_439_808, 12, 768, 12, 50_257, 1024, _GPT2),
    "GPT-2 XL": Shape(1_557_611_200, 48, 1600, 25, 50_257, 1024, _GPT2),
    "7.5 B": Shape(7.5e9, 36, 4096, 32, 51_200, 2048,
                   "Rajbhandari et al. 2020, figure 1; layers: Narayanan et al. 2021, table 1"),
    "Llama 2 7B": llama_shape(32, 4096, 32, 11_008, 32_000, 4096, source=_LLAMA2),
    "Llama 2 13B": llama_shape(40, 5120, 40, 13_824, 32_000, 4096, source=_LLAMA2),
    "Llama 2 70B": llama_shape(80, 8192, 64, 28_672, 32_000, 4096, kv_heads=8, source=_LLAMA2),
    "Llama 3 8B": llama_shape(32, 4096, 32, 14_336, 128_256, kv_heads=8, source=_LLAMA3),
    "Llama 3 70B": llama_shape(80, 8192, 64, 28_672, 128_256, kv_heads=8, source=_LLAMA3),
    "GPT-3": Shape(175e9, 96, 12_288, 96, 50_257, 2048, _GPT3),
    "Llama 3 405B": llama_shape(126, 16_384, 128, 53_248, 128_256, kv_heads=8, source=_LLAMA3),
    "Mixtral 8x7B": llama_shape(32, 4096, 32, 14_336, 32_000, 32_768, kv_heads=8,
                                experts=Experts(8, 2, 14_336),
                                source="Jiang et al. 2024, table 1"),
    "DeepSeek-V3": llama_shape(61, 7168, 128, 18_432, 129_280, 4096,
                               experts=Experts(256, 8, 2048, 1, 3, biased=True), latent=Latent(),
                               source=_DEEPSEEK),
}
