"""What a pipeline loses, and what it holds meanwhile, for the schedules that have a closed form."""

from __future__ import annotations

from dtlab.checks import check_amount, check_whole
from dtlab.errors import ConfigError

SCHEDULES = ("gpipe", "1F1B", "interleaved", "ZB-H1")


def pipeline_bubble_s(
    schedule: str, ranks: int, micro_batches: int, forward_s: float, backward_s: float,
    weights_s: float | None = None, chunks: int = 1, message_s: float = 0.0,
) -> float:
    """Seconds of a step in which the last rank to end does not compute: the step takes
    m(F + B) and this.

    forward_s, backward_s: F and B, of one micro-batch on one rank, all its chunks together.
    weights_s: the part of B for the weights' gradients, half if None; only ZB-H1 asks.
    message_s: c, until a message has arrived; of the first order, for c far below F and m ≥ p. Up
    to 2c off where p does not divide m (1F1B), or m = p (ZB-H1).
    GPipe: (p−1)(F+B+2c); 1F1B: (p−1)(F+B) + (2m(p−1)/p + 2(p−2))c; interleaved:
    (p−1)(F+B)/v + 2(pv−1)c; ZB-H1: (p−1)(F+B−2W+4c), where W ≤ F and W ≤ B−W.
    Source: Narayanan et al. 2021, §2.2; Qi et al. 2024, §2; the terms of c are ours, and a test
    holds them to `Schedule.time`.

    >>> pipeline_bubble_s("interleaved", 4, 8, 1.0, 2.0, chunks=2)
    4.5
    """
    _check(schedule, ranks, micro_batches, chunks)
    for name, value in (("forward_s", forward_s), ("backward_s", backward_s),
                        ("message_s", message_s)):
        check_amount(name, value)
    p, m, both_s = ranks, micro_batches, forward_s + backward_s
    if p == 1:
        return 0.0
    if schedule == "gpipe":
        return (p - 1) * (both_s + 2 * message_s)
    if schedule == "1F1B":
        return (p - 1) * both_s + (2 * m * (p - 1) / p + 2 * (p - 2)) * message_s
    if schedule == "interleaved":
        return (p - 1) * both_s / chunks + 2 * (p * chunks - 1) * message_s
    weights_s = backward_s / 2 if weights_s is None else weights_s
    return (p - 1) * (max(both_s - 2 * weights_s, 0.0) + 4 * message_s)


def micro_batches_in_flight(schedule: str, ranks: int, micro_batches: int, chunks: int = 1,
                            last: bool = False) -> float:
    """Of how many micro-batches the first rank holds activations, at most: GPipe all, 1F1B and
    ZB-H1 as many as there are ranks, interleaved with v ≥ 2 chunks (p−1)/v more. With chunks, one
    counts as 1/v. last: of how many the last rank does: 1F1B one, interleaved v−1 chunks of p, and
    one; the others as many as the first.

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
    if schedule not in SCHEDULES:
        raise ConfigError(f"a schedule with a closed form is one of {', '.join(SCHEDULES)}, not "
                          f"{schedule!r}")
    for name, value in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
        check_whole(name, value)
