"""The memory of training, state and activations, and the bytes that ZeRO sends for it."""

from __future__ import annotations

from dtlab.checks import (
    check_amount,
    check_choice,
    check_each,
    check_flag,
    check_whole,
    is_whole,
    short,
)
from dtlab.errors import ConfigError

RECOMPUTE = ("none", "selective", "full")  # which activations backward computes again


def model_state_bytes(
    parameters: float, ranks: int = 1, stage: int = 0, parameter_bytes: float = 2,
    gradient_bytes: float = 2, optimizer_bytes: float = 12,
) -> float:
    """Bytes a rank for the state of `parameters` parameters on `ranks` ranks of data parallelism.

    stage: of ZeRO, which shards the optimizer's state (1), gradients as well (2), parameters as
    well (3); 0: everything is everywhere. The defaults are those of mixed precision with Adam:
    bf16 parameters and gradients, float32 parameters, mean and variance. Activations are not in it,
    nor what pads parameters to a multiple of `ranks`.
    Source: Rajbhandari et al. 2020, §5, figure 1.

    >>> [round(model_state_bytes(7.5e9, 64, stage) / 1e9, 1) for stage in range(4)]
    [120.0, 31.4, 16.6, 1.9]
    """
    check_whole("ranks", ranks)
    check_each(check_amount, parameters=parameters, parameter_bytes=parameter_bytes,
               gradient_bytes=gradient_bytes, optimizer_bytes=optimizer_bytes)
    if not is_whole(stage) or stage not in (0, 1, 2, 3):
        raise ConfigError(f"ZeRO has the stages 1, 2 and 3 (0: none), not {short(stage)}")
    shared = ((optimizer_bytes, 1), (gradient_bytes, 2), (parameter_bytes, 3))
    return sum(parameters * size / (ranks if stage >= first else 1) for size, first in shared)


def zero_sent_bytes(parameters: float, ranks: int, stage: int = 0, itemsize: float = 2,
                    gradient_itemsize: float | None = None) -> float:
    """Bytes that a rank sends in a step, on `ranks` ranks of data parallelism or a stage of ZeRO.

    Up to stage 2 each parameter of `itemsize` bytes crosses twice (its gradient is reduced and
    scattered, its new value gathered, or both are one all-reduce), in stage 3 three times: it is
    gathered forward and backward. Each crossing costs (N−1)/N of the vector, as with rings.
    gradient_itemsize: bytes of a gradient, if not `itemsize`; an all-reduce hands out gradients.
    Source: Rajbhandari et al. 2020, §7.

    >>> zero_sent_bytes(100, 4, 3, itemsize=1)
    225.0
    """
    model_state_bytes(parameters, ranks, stage)  # raises for what makes no sense
    check_amount("itemsize", itemsize)
    gradient = itemsize if gradient_itemsize is None else gradient_itemsize
    check_amount("gradient_itemsize", gradient)
    gathered = gradient if stage == 0 else 2 * itemsize if stage == 3 else itemsize
    return parameters * (gradient + gathered) * (ranks - 1) / ranks


def activation_bytes(
    batch: int, positions: int, hidden: int, heads: int, layers: int = 1, *, tensor: int = 1,
    sequence: bool = False, recompute: str = "none",
) -> float:
    """Bytes that backward needs of the forward pass of `layers` transformer layers, in 16 bits, on
    a rank with `batch` samples of `positions` positions, if attention keeps its scores.

    A layer keeps sbh(34 + 5as/h). tensor: each of t tensor-parallel ranks keeps
    sbh(10 + 24/t + 5as/(ht)); with `sequence`, sequence parallelism that gathers a region's input
    again in backward, it keeps a t-th of all.
    recompute: "selective" computes the attention's scores, softmax and dropout again, without the
    term of 5as/h; "full" keeps only each layer's input, 2sbh.
    Source: Korthikanti et al. 2022, table 2. Not in it: embeddings, the loss, what other
    attention kernels save or layers with other MLPs keep.

    >>> activation_bytes(1, 2048, 12288, 96, recompute="full") / (2048 * 12288)
    2.0
    """
    check_whole("batch", batch, 0)
    check_each(check_whole, positions=positions, hidden=hidden, heads=heads, layers=layers,
               tensor=tensor)
    check_flag("sequence", sequence)
    check_choice("recompute option", recompute, RECOMPUTE)
    input_size = positions * batch * hidden * layers
    if recompute == "full":
        return 2.0 * input_size
    scores = 5 * heads * positions / hidden if recompute == "none" else 0
    replicated = 10 / tensor if sequence else 10
    return input_size * (replicated + (24 + scores) / tensor)
