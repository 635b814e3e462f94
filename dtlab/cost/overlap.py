"""The part of data parallelism's communication that hides behind the backward pass."""

from __future__ import annotations

from dtlab.checks import check_amount, check_flag, check_positive, check_whole
from dtlab.cost.model import time_s


def exposed_s(
    backward_s: float, nbytes: int, buckets: int, ranks: int, alpha: float, beta: float,
    algorithm: str = "ring", overlap: bool = True,
) -> float:
    """Seconds for which a step only communicates, if gradients of `nbytes` leave in `buckets` equal
    buckets, the first of which is full after a part 1/buckets of a backward of `backward_s`.

    An all-reduce of one bucket takes c, computing the gradients of one takes b. The reductions run
    one after another, each at its bucket's time at the earliest, so the last one ends
    c + max(0, (buckets − 1)·(c − b)) after backward: the last bucket is always exposed, and of the
    others what takes longer than backward. Without overlap: buckets·c.

    >>> f"{exposed_s(0.2, 100_000_000, 1, 4, 1e-5, 1e-9):.5f}"  # one bucket: all of it
    '0.15006'
    >>> f"{exposed_s(0.2, 100_000_000, 10, 4, 1e-5, 1e-9):.5f}"  # ten: the last one
    '0.01506'
    """
    check_positive("backward_s", backward_s)
    check_amount("nbytes", nbytes)
    check_whole("buckets", buckets)
    check_flag("overlap", overlap)
    each_s = time_s("all_reduce", algorithm, ranks, nbytes // buckets, alpha, beta)
    if not overlap:
        return buckets * each_s
    return each_s + max(0.0, (buckets - 1) * (each_s - backward_s / buckets))


def best_buckets(
    backward_s: float, nbytes: int, layers: int, ranks: int, alpha: float, beta: float,
    algorithm: str = "ring",
) -> int:
    """The number of equal buckets, each of whole ones of `layers` equal layers, that exposes the
    least; the fewest of equals.

    With few, the last bucket takes long; with many, each pays its latencies.
    """
    check_whole("layers", layers, 1, 10_000)
    whole = (buckets for buckets in range(1, layers + 1) if layers % buckets == 0)
    return min(whole, key=lambda buckets: exposed_s(
        backward_s, nbytes, buckets, ranks, alpha, beta, algorithm))
