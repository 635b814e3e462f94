"""Real models as numbers, for predictions: nothing here is built."""

from __future__ import annotations

from typing import NamedTuple

from dtlab.checks import check_amount, check_choice, check_flag, check_number, check_whole, short
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
    mask hides; "stored" computes all scores and keeps them, as Megatron-LM did in 2021.
    head_width: of a head's queries, keys and values, None for hidden / heads."""

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
    head_width: int | None = None

    @property
    def width(self) -> int:
        """The width of one MLP."""
        return 4 * self.hidden if self.mlp_width is None else self.mlp_width

    @property
    def query_width(self) -> int:
        """Elements of one head's queries for one token."""
        if self.latent:
            return self.latent.width + self.latent.rotary
        return self.hidden // self.heads if self.head_width is None else self.head_width

    @property
    def queries(self) -> int:
        """Elements of all heads' queries for one token."""
        return self.heads * self.query_width

    @property
    def keys(self) -> int:
        """Elements of all heads' keys for one token, as attention's kernel reads them."""
        return self.queries if self.latent else self.grouped * self.query_width

    @property
    def values(self) -> int:
        """Elements of all heads' values for one token, likewise."""
        return self.heads * self.latent.value_width if self.latent else self.keys

    @property
    def attended(self) -> int:
        """Elements of all heads' outputs for one token."""
        return self.heads * self.latent.value_width if self.latent else self.queries

    @property
    def grouped(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def attention_parameters(self) -> int:
        """The parameters in the matrices of one layer's attention."""
        h, latent = self.hidden, self.latent
        if latent is None:
            return h * (self.queries + self.keys + self.values) + self.attended * h
        return (h * latent.query_rank + latent.query_rank * self.queries
                + h * (latent.rank + latent.rotary)
                + latent.rank * self.heads * (latent.width + latent.value_width)
                + self.attended * h)

    @property
    def expert_parameters(self) -> int:
        """The parameters of all routed experts of all layers."""
        if self.experts is None:
            return 0
        layers = self.layers - self.experts.dense_layers
        return layers * self.experts.number * self.mlp_parameters(self.experts.width)

    @property
    def matrix_parameters(self) -> int:
        """The parameters in matrices; vocabulary tables and the experts' routers are among them."""
        experts, dense = self.experts, self.layers
        tables = (1 if self.tied else 2) * self.vocab * self.hidden
        count = tables + self.layers * self.attention_parameters + self.expert_parameters
        if experts is not None:
            dense = experts.dense_layers
            count += (self.layers - dense) * (
                experts.number * self.hidden + experts.shared * self.mlp_parameters(experts.width))
        return count + dense * self.mlp_parameters(self.width)

    def mlp_parameters(self, width: int) -> int:
        """Count the parameters in the matrices of an MLP of this width."""
        return (3 if self.gated else 2) * self.hidden * width


def check_sizes(shape: Shape) -> None:
    """Raise `ConfigError` unless a model can have these sizes. Its parameters are not looked at."""
    experts, latent = shape.experts, shape.latent
    for name, kind in (("experts", Experts), ("latent", Latent)):
        if not isinstance(getattr(shape, name), kind | None):
            raise ConfigError(f"{name} must be of type {kind.__name__}, or None, not "
                              f"{short(getattr(shape, name))}")
    for name in ("layers", "hidden", "heads", "vocab", "positions"):
        check_whole(name, getattr(shape, name))
    for name in ("kv_heads", "mlp_width", "head_width"):
        if getattr(shape, name) is not None:
            check_whole(name, getattr(shape, name))
    for name in ("tied", "gated"):
        check_flag(name, getattr(shape, name))
    check_choice("attention", shape.attention, ATTENTION)
    if experts is not None:
        for name, least, most in (("number", 1, 100_000), ("width", 1, 10_000_000),
                                  ("shared", 0, 1000), ("dense_layers", 0, shape.layers - 1)):
            check_whole(f"experts.{name}", getattr(experts, name), least, most)
        check_whole("experts.top", experts.top, 1, experts.number)
        check_amount("experts.capacity", experts.capacity)
        check_flag("experts.biased", experts.biased)
    for name, size in (latent or Latent())._asdict().items():
        check_whole(f"latent.{name}", size)
    if shape.heads % shape.grouped:
        raise ConfigError(f"{shape.kv_heads} heads of keys and values can't be shared equally by "
                          f"{shape.heads} heads")
    if latent is not None and shape.head_width is not None:
        raise ConfigError("latent attention has widths of its own; leave head_width out")
    if latent is None and shape.head_width is None and shape.hidden % shape.heads:
        raise ConfigError(f"a hidden size of {shape.hidden} can't be cut into {shape.heads} heads; "
                          f"if a head has another width, name it as head_width")


def check_shape(shape: Shape) -> None:
    """Raise `ConfigError` unless a model can have these sizes, and as many parameters: those of its
    matrices, beside them a table of positions and a few vectors a layer, and a tenth for what is
    rounded, or not described."""
    check_sizes(shape)
    check_number("parameters", shape.parameters)
    counted = shape.matrix_parameters
    others = (shape.positions + 13 * shape.layers) * shape.hidden
    if abs(shape.parameters - counted) > 0.1 * counted + others:
        raise ConfigError(f"matrices of these sizes have {counted:,} parameters, but the shape "
                          f"says {shape.parameters:,}; llama_shape and gpt_shape count them")


def gpt_shape(layers: int, hidden: int, heads: int, vocab: int = 51_200, positions: int = 2048,
              attention: str = "stored") -> Shape:
    """The shape of `GPT(GPTConfig(…))` with these sizes and a tied embedding, and of Megatron-LM's
    GPTs: layers of 12h² + 13h parameters, vocabulary and positions of h each, a last norm of 2h.
    Raises `ConfigError` unless heads divides hidden.

    Source: Narayanan et al. 2021, §5.1, equation 2 (which leaves out the last norm).

    >>> gpt_shape(12, 768, 12, 50_257, 1024).parameters
    124439808
    """
    shape = Shape(0, layers, hidden, heads, vocab, positions, "its own sizes", attention=attention)
    check_sizes(shape)
    vectors = (13 * layers + positions + 2) * hidden
    return shape._replace(parameters=shape.matrix_parameters + vectors)


def llama_shape(layers: int, hidden: int, heads: int, mlp_width: int, vocab: int,
                positions: int = 8192, *, kv_heads: int | None = None, tied: bool = False,
                experts: Experts | None = None, latent: Latent | None = None,
                head_width: int | None = None, source: str = "its own sizes") -> Shape:
    """The shape of a model built as Llama, Mixtral and DeepSeek are: RMSNorm, rotary positions,
    gated MLPs, no biases, all of the context in each layer's attention; its parameters counted.
    More norms or biases, as Qwen's, Gemma's and GPT-OSS's, are vectors that hardly count: for the
    checkpoint's number, replace `parameters`. Windows of attention can't be described. Raises
    `ConfigError` unless kv_heads divides heads, and heads divides hidden or head_width is given.

    Source: Touvron et al. 2023; Jiang et al. 2024; DeepSeek-AI 2024 (without the extra prediction
    head).

    >>> llama_shape(32, 4096, 32, 14_336, 128_256, kv_heads=8).parameters
    8030261248
    """
    shape = Shape(0, layers, hidden, heads, vocab, positions, source, tied, kv_heads, mlp_width,
                  True, experts, latent, head_width=head_width)
    check_whole("mlp_width", mlp_width)
    check_sizes(shape)
    vectors = (2 * layers + 1) * hidden  # norms
    if latent is not None:
        vectors += layers * (latent.query_rank + latent.rank)
    if experts is not None and experts.biased:
        vectors += (layers - experts.dense_layers) * experts.number
    return shape._replace(parameters=shape.matrix_parameters + vectors)


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
