"""What one transformer layer computes: floating-point operations and bytes of memory traffic."""

from __future__ import annotations

from dtlab.checks import check_amount, check_whole


def matrix_product_flops(batch: int, positions: int, hidden: int, layer_parameters: float) -> float:
    """Floating-point operations of a layer's forward pass in matrix products, for `batch` samples:
    2 for each token and parameter, and 4bs²h for attention's scores and its weighted sums (all of
    them, also those that a causal mask hides).

    With the 12h² parameters of GPT's layers that is 24bsh²(1 + s/6h). Backward takes twice as many.
    Source: Narayanan et al. 2021, appendix.

    >>> matrix_product_flops(1, 2048, 12288, 12 * 12288**2) / (24 * 2048 * 12288**2)
    1.0277...
    """
    check_amount("layer_parameters", layer_parameters)
    attention = attention_flops(batch, positions, hidden)
    return 2 * batch * positions * layer_parameters + attention


def attention_flops(batch: int, positions: int, hidden: int) -> float:
    """The part of `matrix_product_flops` for attention's scores and weighted sums: 4bs²h."""
    for name, value in (("batch", batch), ("positions", positions), ("hidden", hidden)):
        check_whole(name, value)
    return 4 * batch * positions * positions * hidden


def memory_traffic_bytes(
    batch: int, positions: int, hidden: int, heads: int, tensor: int = 1, sequence: bool = False,
    itemsize: int = 2,
) -> float:
    """Bytes that a layer's forward pass reads and writes outside matrix products, on a rank of
    `tensor` tensor-parallel ones, if each kernel reads its inputs from memory and writes its
    output: 11 + 14/t + 6.5as/(ht) times the size bsh of an activation.

    In units of bsh elements: two norms read and write 4; two sums of bias, dropout and residual
    read 4, write 2 and a mask of half an element's bytes each: 7 together. These 11 are
    on every rank, with `sequence` on a t-th. Gelu reads and writes 8, the heads of q, k and v are
    transposed, 6: 14/t. Of attention's a·s scores a token, 2 are written and read by the matrix
    products, the softmax reads and writes 2, dropout reads and writes 2 and half a mask:
    6.5as/(ht). A kernel that keeps scores in registers (FlashAttention) has none of the last.
    Source: counted, of the kernels that Korthikanti et al. 2022 describe; against its table 4.
    """
    check_whole("hidden", hidden)
    attention = attention_traffic_bytes(batch, positions, heads, tensor, itemsize)
    everywhere = 11 / tensor if sequence else 11
    size = batch * positions * hidden * itemsize
    return size * (everywhere + 14 / tensor) + attention


def attention_traffic_bytes(batch: int, positions: int, heads: int, tensor: int = 1,
                            itemsize: int = 2) -> float:
    """The part of `memory_traffic_bytes` for attention's scores."""
    for name, value in (("batch", batch), ("positions", positions), ("heads", heads),
                        ("tensor", tensor), ("itemsize", itemsize)):
        check_whole(name, value)
    return 6.5 * heads * positions * positions * batch * itemsize / tensor
