"""The bubble of a pipeline, and what it holds meanwhile, for schedules that have a closed form."""

from __future__ import annotations

from dtlab.checks import check_amount, check_choice, check_each, check_whole
from dtlab.errors import ConfigError

SCHEDULES = ("gpipe", "1F1B", "interleaved", "ZB-H1")


def pipeline_bubble_s(
    schedule: str, ranks: int, micro_batches: int, forward_s: float, backward_s: float,
    weights_s: float | None = None, chunks: int = 1, message_s: float = 0.0,
) -> float:
    """Seconds of a step in which the last rank to end does not compute: the step takes
    m(F + B) and this.

    forward_s, backward_s: F and B, of one micro-batch on one rank, all its chunks together.
    weights_s: W, the part of B for the weights' gradients, half if None; only ZB-H1 asks. chunks:
    v; only interleaved asks.
    message_s: c, until a message has arrived; of the first order, for c far below F and m ≥ p. Up
    to 2c off where p does not divide m (1F1B), or m = p (ZB-H1).
    GPipe: (p−1)(F+B+2c). 1F1B, and interleaved with one chunk: (p−1)(F+B) + (2m(p−1)/p + 2(p−2))c.
    Interleaved with more: (p−1)(F+B)/v + 2(pv−1)c, where p divides m. ZB-H1: (p−1)(F+B−2W+4c),
    where m ≥ p, W ≤ F and W ≤ B−W. Raises `ConfigError` elsewhere.
    Source: Narayanan et al. 2021, §2.2; Qi et al. 2024, §2; the terms of c are ours, and a test
    holds them to `Schedule.time`.

    >>> pipeline_bubble_s("interleaved", 4, 8, 1.0, 2.0, chunks=2)
    4.5
    """
    _check(schedule, ranks, micro_batches, chunks)
    check_amount("backward_s", backward_s)
    weights_s = backward_s / 2 if weights_s is None else weights_s
    check_each(check_amount, forward_s=forward_s, message_s=message_s, weights_s=weights_s)
    p, m, both_s = ranks, micro_batches, forward_s + backward_s
    if schedule == "ZB-H1" and not zb_h1_holds(p, m, forward_s, backward_s, weights_s):
        raise ConfigError(f"the closed form of ZB-H1 holds for no fewer micro-batches than ranks, "
                          f"and weights_s up to forward_s and half of backward_s; not for {m} on "
                          f"{p}, {weights_s:g} of {forward_s:g} and {backward_s:g} s")
    if p == 1:
        return 0.0
    if schedule == "gpipe":
        return (p - 1) * (both_s + 2 * message_s)
    if schedule == "ZB-H1":
        return (p - 1) * (both_s - 2 * weights_s + 4 * message_s)
    if schedule == "interleaved" and chunks > 1:
        return (p - 1) * both_s / chunks + 2 * (p * chunks - 1) * message_s
    return (p - 1) * both_s + (2 * m * (p - 1) / p + 2 * (p - 2)) * message_s


def zb_h1_holds(ranks: int, micro_batches: int, forward_s: float, backward_s: float,
                weights_s: float) -> bool:
    """Does the closed form of ZB-H1's bubble hold? See `pipeline_bubble_s`."""
    most_s = min(forward_s, backward_s / 2) * (1 + 1e-9)
    return ranks == 1 or (micro_batches >= ranks and weights_s <= most_s)


def micro_batches_in_flight(schedule: str, ranks: int, micro_batches: int, chunks: int = 1,
                            last: bool = False) -> float:
    """Return the most micro-batches whose activations the first rank holds: GPipe all, 1F1B and
    ZB-H1 as many as there are ranks, interleaved with v ≥ 2 chunks (p−1)/v more. With chunks, one
    counts as 1/v; only interleaved asks for them, and p must divide m, else `ConfigError`. last:
    of how many the last rank does: 1F1B one, interleaved v−1 chunks of p, and one; the others as
    many as the first.

    >>> micro_batches_in_flight("interleaved", 4, 8, 2)
    5.5
    """
    _check(schedule, ranks, micro_batches, chunks)
    if schedule == "gpipe":
        return micro_batches
    most: float = ranks
    if schedule == "interleaved" and chunks > 1:
        most = ((chunks - 1) * ranks + 1) / chunks if last else ranks + (ranks - 1) / chunks
    elif schedule in ("1F1B", "interleaved") and last:
        most = 1
    return min(micro_batches, most)


def _check(schedule: str, ranks: int, micro_batches: int, chunks: int) -> None:
    check_choice("closed form of the schedule", schedule, SCHEDULES)
    check_each(check_whole, ranks=ranks, micro_batches=micro_batches, chunks=chunks)
    if schedule == "interleaved" and chunks > 1 and micro_batches % ranks:
        raise ConfigError(f"the closed form of interleaved holds where the ranks divide the "
                          f"micro-batches, not for {micro_batches} on {ranks}")
