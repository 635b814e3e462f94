"""The pipeline schedules that a layout may have: which stages a rank has, how long a step idles,
what is held meanwhile."""

from __future__ import annotations

from functools import lru_cache

from dtlab import cost
from dtlab.cost.pipeline import SCHEDULES as CLOSED
from dtlab.cost.pipeline import zb_h1_holds
from dtlab.parallel import pipeline
from dtlab.parallel.pipeline.schedule import Schedule

# Those without a closed form are timed, action by action: `plan` doesn't try them.
TIMED = {"ZB-H2": pipeline.zb_h2, "ZB-V": pipeline.zb_v, "DualPipe-V": pipeline.dualpipe_v,
         "looped BFS": pipeline.looped_bfs}
GENERATORS = dict(zip(CLOSED, (pipeline.gpipe, pipeline.one_f_one_b, pipeline.interleaved,
                               pipeline.zb_h1), strict=True)) | TIMED
TWO_CHUNKS = ("ZB-V", "DualPipe-V")  # a rank has the stages r and 2p−1−r
HALVED = ("ZB-H1", "ZB-H2", *TWO_CHUNKS)  # backward is two actions, inputs' and weights' gradients
CHUNKED = ("interleaved", "looped BFS", *TWO_CHUNKS)


@lru_cache(64)
def schedule_of(name: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """The actions of each rank."""
    options = (chunks,) if name in ("interleaved", "looped BFS") else ()
    return GENERATORS[name](ranks, micro_batches, *options)


def stages_of(name: str, ranks: int, chunks: int, rank: int) -> list[int]:
    """The stages of a rank; with several chunks in a row of all ranks, or in a V."""
    if name in TWO_CHUNKS:
        return [rank, 2 * ranks - 1 - rank]
    return [chunk * ranks + rank for chunk in range(chunks)]


def bubble_s_of(name: str, ranks: int, micro_batches: int, forward_s: float, backward_s: float,
                weights_s: float, chunks: int, message_s: float) -> float:
    """Seconds of a step in which the last rank to end does not compute; see
    `cost.pipeline_bubble_s`, whose closed forms are used where they hold."""
    if name in CLOSED and (name != "ZB-H1" or zb_h1_holds(
            ranks, micro_batches, forward_s, backward_s, weights_s)):
        return cost.pipeline_bubble_s(name, ranks, micro_batches, forward_s, backward_s, weights_s,
                                      chunks, message_s)
    timing = schedule_of(name, ranks, micro_batches, chunks).time(
        F=forward_s, B=backward_s, W=weights_s, comm=message_s)
    return timing.elapsed - micro_batches * (forward_s + backward_s)


def messages_s_of(name: str, ranks: int, micro_batches: int, forward_s: float, backward_s: float,
                  weights_s: float, chunks: int, output_s: float, message_s: float,
                  one_way_s: float, both_s: float) -> float:
    """Seconds that messages add to a step. Each takes `message_s`; a micro-batch's hold the busiest
    link for `one_way_s` forward and for `both_s` forward and backward, and no step goes faster.
    output_s: for which the last rank computes more than others, a third of it forward.
    Where messages take longer than computing, GPipe's step is the simulated one, and that of the
    others is fitted: to a quarter on uniform networks of up to eight ranks, to 40 % where only one
    hop is slow."""
    p, m, sizes = ranks, micro_batches, (forward_s, backward_s, weights_s, chunks)
    added_s = bubble_s_of(name, p, m, *sizes, message_s) - bubble_s_of(name, p, m, *sizes, 0.0)
    if name == "gpipe":
        return added_s + (m - 1) * sum(max(0.0, one_way_s - each - part * output_s)
                                       for each, part in zip(sizes, (1 / 3, 2 / 3), strict=False))
    busy_s = forward_s + backward_s + output_s
    if name in ("1F1B", "ZB-H1"):  # a rank waits for its messages' way there and back
        way_s = 2 * (p - 1) / p * message_s
        added_s = max(added_s, m * (way_s - weights_s), m * ((1 + (p > 2)) * way_s - busy_s))
    return max(added_s, m * (both_s - busy_s))


def in_flight(name: str, ranks: int, micro_batches: int, chunks: int, last: bool = False) -> float:
    """Return the most micro-batches whose activations the first rank, or the last, holds."""
    if name in CLOSED:
        return cost.micro_batches_in_flight(name, ranks, micro_batches, chunks, last)
    return schedule_of(name, ranks, micro_batches, chunks).time().held[-1 if last else 0]
