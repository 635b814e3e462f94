"""The schedules in use, each a function of p ranks and m micro-batches.

In all, m may be any number, also fewer than p. Stages are numbered as the model is cut: rank r has
stage r; with v chunks a rank also p+r, 2p+r, …; in a V, rank r has the stages r and 2p−1−r.
Sources with each. Chapter: 12.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from dtlab.checks import check_whole
from dtlab.errors import ConfigError
from dtlab.parallel.pipeline.action import Action
from dtlab.parallel.pipeline.schedule import Schedule

LARGEST = 1_000_000  # forwards, which take seconds
Steps = list[tuple[int, int]]  # (stage, micro-batch)


def naive(p: int, m: int = 1) -> Schedule:
    """One micro-batch after the other, forward and backward: one rank works at a time."""
    _check(p, m)
    return Schedule.of([Action(r, kind, i) for i in range(m) for kind in "FB"] for r in range(p))


def gpipe(p: int, m: int) -> Schedule:
    """All forward, then all backward, last first. Bubble: (p−1)(F+B). In flight: m. Source: Huang
    et al. 2019."""
    return looped_bfs(p, m, 1)


def one_f_one_b(p: int, m: int) -> Schedule:
    """Rank i begins with p−i forwards, then backward and forward alternate. Bubble: (p−1)(F+B). In
    flight: min(m, p−i). Source: Narayanan et al. 2019 (PipeDream-Flush: 2021)."""
    return interleaved(p, m, 1)


def interleaved(p: int, m: int, v: int = 2) -> Schedule:
    """1F1B with v chunks a rank. In ⌊m/p⌋ rounds, of p micro-batches each if p divides m, all of a
    round go through one chunk, then through the next. Bubble: (p−1)(F+B)/v, if p divides m. Source:
    Narayanan et al. 2021 (Megatron-LM), §2.2; other m: torch's ScheduleInterleaved1F1B."""
    _check(p, m, v)
    rounds = max(m // p, 1)
    ends = [m // rounds * n + min(n, m % rounds) for n in range(rounds + 1)]  # longer ones first
    rows = []
    for r in range(p):
        turns = [(chunk, i) for first, end in pairwise(ends) for chunk in range(v)
                 for i in range(first, end)]
        forward = [(chunk * p + r, i) for chunk, i in turns]
        backward = [((v - 1 - chunk) * p + r, i) for chunk, i in turns]
        ahead = p - r - 1 if v == 1 else 2 * (p - r - 1) + (v - 1) * ends[1]
        rows.append(alternate(forward, backward, ahead + 1))
    return Schedule.of(rows)


def looped_bfs(p: int, m: int, v: int = 2) -> Schedule:
    """All micro-batches through one chunk, then through the next, then all the way back. Bubble:
    (p−1)(F+B)/v where m ≥ p. In flight: m. Source: Lamy-Poirier 2023."""
    _check(p, m, v)
    return Schedule.of(
        [Action(chunk * p + r, "F", i) for chunk in range(v) for i in range(m)]
        + [Action((v - 1 - chunk) * p + r, "B", m - 1 - i) for chunk in range(v) for i in range(m)]
        for r in range(p))


def zb_h1(p: int, m: int) -> Schedule:
    """1F1B with backward in two: weight gradients fill what would be bubble. Bubble: (p−1)(F+B−2W),
    where W ≤ F, W ≤ B−W and m ≥ p. Held: min(m, p), on every rank, which in 1F1B only the first
    holds. Source: Qi et al. 2024, §2.1."""
    _check(p, m)
    return _zero_bubble(p, m, [p - r for r in range(p)], range(p))


def zb_h2(p: int, m: int) -> Schedule:
    """Twice as many forwards first: about twice the memory, and where F = B−W = W no bubble but at
    begin and end. Bubble: (p−1)(F+B−3W), where W ≤ F, W ≤ B−W and m ≥ 2p−1. Source: Qi et al. 2024,
    §2.2."""
    _check(p, m)
    return _zero_bubble(p, m, [2 * (p - r) - 1 for r in range(p)], [2 * r for r in range(p)])


def _zero_bubble(p: int, m: int, ahead: list[int], waiting: Iterable[int]) -> Schedule:
    """Rank r begins with ahead[r] forwards, then I and F alternate; it does the oldest W as soon as
    more than waiting[r] wait."""
    rows = []
    for r, allowed in zip(range(p), waiting, strict=True):
        row = [Action(r, "F", i) for i in range(min(m, ahead[r]))]
        weights = 0
        for i in range(m):
            row.append(Action(r, "I", i))
            if i + 1 - weights > allowed:
                row.append(Action(r, "W", weights))
                weights += 1
            if i + ahead[r] < m:
                row.append(Action(r, "F", i + ahead[r]))
        rows.append(row + [Action(r, "W", i) for i in range(weights, m)])
    return Schedule.of(rows)


def zb_v(p: int, m: int) -> Schedule:
    """Two chunks a rank in a V, so that the last stage lies where the first does. Bubble: 0 where
    F = B−W = W and m ≥ 2p − 1. In flight: at most p. Source: Qi et al. 2024 (controllable memory),
    §3."""
    _check(p, m)
    rows = []
    for r in range(p):
        down, up = _Chunk(r, m), _Chunk(2 * p - 1 - r, m)
        row = down.forward(2 * (p - r) - 1)
        for _ in range(r):
            row += up.forward() + down.forward()
        for _ in range(p - r):
            row += up.forward() + up.inputs() + up.weights()
        while up.forwards < m:
            row += down.forward() + down.inputs() + down.weights()
            row += up.forward() + up.inputs() + up.weights()
        for _ in range(r):
            row += down.inputs() + up.inputs()
        for _ in range(p - r):
            row += down.inputs() + down.weights()
        rows.append(row + up.weights(m) + down.weights(m))
    return Schedule.of(rows)


def dualpipe_v(p: int, m: int) -> Schedule:
    """DualPipe folded: two chunks a rank in a V; in between, forward of one chunk and backward of
    the other alternate, so that messages of one hide behind the other. In flight: p + 1/2.
    Source: DeepSeek-AI 2024 (DualPipe); the V: Qi et al. 2025."""
    _check(p, m)
    rows = []
    for r in range(p):
        down, up = _Chunk(r, m), _Chunk(2 * p - 1 - r, m)
        down.waiting = up.waiting  # the oldest W of both comes first
        row = down.forward(2 * (p - r - 1))
        for _ in range(r + 1):
            row += down.forward() + up.forward()
        for _ in range(p - r - 1):
            row += up.inputs() + up.weights() + up.forward()
        for _ in range(max(m - 2 * p + r + 1, 0)):
            row += down.forward() + up.full() + up.forward() + down.full()
        for _ in range(p - r - 1):
            row += up.full() + up.forward() + down.full()
        for k in range(r + 1):  # from half way on, backward in two
            row += up.inputs() if 2 * k > r or (2 * k == r + 1) else up.full()
            row += down.inputs() if 2 * k >= r else down.full()
        for _ in range(p - r - 1):
            row += up.weights() + down.inputs()
        row += up.forward(m) + up.inputs(m) + down.inputs(m)
        rows.append(row + up.weights(2 * m))
    return Schedule.of(rows)


class _Chunk:
    """Counts through the micro-batches of one stage: each call gives the next actions of a kind."""

    def __init__(self, stage: int, m: int):
        self.stage, self.m = stage, m
        self.forwards = self.backwards = 0
        self.waiting: list[Action] = []  # for their W

    def forward(self, count: int = 1) -> list[Action]:
        first, self.forwards = self.forwards, min(self.forwards + count, self.m)
        return [Action(self.stage, "F", i) for i in range(first, self.forwards)]

    def full(self, count: int = 1, kind: str = "B") -> list[Action]:
        first, self.backwards = self.backwards, min(self.backwards + count, self.m)
        return [Action(self.stage, kind, i) for i in range(first, self.backwards)]

    def inputs(self, count: int = 1) -> list[Action]:
        now = self.full(count, "I")
        self.waiting += [action._replace(kind="W") for action in now]
        return now

    def weights(self, count: int = 1) -> list[Action]:
        now = self.waiting[:count]
        del self.waiting[:count]
        return now


def alternate(forward: Steps, backward: Steps, ahead: int) -> list[Action]:
    """`ahead` forwards, then backward and forward in turn."""
    row = [Action(stage, "F", i) for stage, i in forward[:ahead]]
    rest = forward[ahead:]
    for number, (stage, i) in enumerate(backward):
        row.append(Action(stage, "B", i))
        row += [Action(stage, "F", i) for stage, i in rest[number : number + 1]]
    return row


def _check(p: int, m: int, v: int = 1) -> None:
    for name, value in (("p, the ranks,", p), ("m, the micro-batches,", m), ("v, the chunks,", v)):
        check_whole(name, value)
    if p * v * max(m, p) > LARGEST:
        raise ConfigError(f"{p:,} ranks, {m:,} micro-batches and {v:,} chunks make a schedule of "
                          f"more than {LARGEST:,} forwards")
