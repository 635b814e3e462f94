"""The traffic of tensor parallelism."""

from __future__ import annotations

from dtlab.checks import check_each, check_whole
from dtlab.errors import ConfigError


def tensor_parallel_bytes(
    ranks: int, batch: int, positions: int, hidden: int, layers: int = 1, itemsize: int = 2,
    sequence: bool | str = False,
) -> float:
    """Bytes that a rank sends in the transformer layers of one step, forward and backward, with
    rings, if `ranks` divides the positions and the hidden size.

    A layer has two regions, attention and MLP, and each an all-reduce of b·s·h elements forward and
    one backward: 8(t−1)/t·bsh in all. sequence: each is a reduce-scatter and an all-gather instead,
    of the same volume; the gradients of two norms and two biases, 6h elements, are all-reduced
    besides. "regather": each region gathers its input once more in backward.
    Source: Shoeybi et al. 2019, §3; Korthikanti et al. 2022, §4.2.

    >>> tensor_parallel_bytes(2, 1, 10, 10, itemsize=1)
    400.0
    """
    check_each(check_whole, ranks=ranks, batch=batch, positions=positions, hidden=hidden,
               layers=layers, itemsize=itemsize)
    if not isinstance(sequence, bool) and sequence != "regather":
        raise ConfigError(f"sequence is True, False or 'regather', not {sequence!r:.40}")
    whole = batch * positions * hidden
    elements = 8 * whole + (12 * hidden if sequence else 0)
    elements += 2 * whole if sequence == "regather" else 0
    return layers * elements * itemsize * (ranks - 1) / ranks
