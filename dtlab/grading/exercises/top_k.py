"""Chapter 08b: top-k with error feedback: the mean of what was sent, and what stays in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtlab.comm import Comm
from dtlab.grading.case import Case, Wanted, counted
from dtlab.grading.draws import generator, varied
from dtlab.grading.exercise import WITH_COLLECTIVES, Check, Exercise
from dtlab.grading.standard import F64, sent_at_most, values

ENTRY = 16  # bytes: a float64 and an int64
WIDE = 1 + 2**-30  # makes of a whole number one that float32 does not hold; sums stay exact


def follow(gs: list[torch.Tensor], k: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """gs[rank]: (steps, n). The mean of each step, and each rank's memory in the end."""
    memories, means = [torch.zeros_like(g[0]) for g in gs], []
    for step in range(len(gs[0])):
        total = torch.zeros_like(memories[0])
        for g, memory in zip(gs, memories, strict=True):
            memory += g[step]
            places = memory.abs().topk(min(k, len(memory))).indices
            total[places] += memory[places]
            memory[places] = 0
        means.append(total / len(gs))
    return means, memories


def call(function: Callable[..., Any], comm: Comm, gs: torch.Tensor, k: int
         ) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """In the sandbox, return each step's result; and the memory and all gradients in the end."""
    memory = torch.zeros_like(gs[0])
    means = [function(comm, g, memory, k) for g in gs]
    return [m.clone() if isinstance(m, torch.Tensor) else m for m in means], memory, gs


def _case(ranks: int, n: int, k: int, steps: int, seed: int) -> Case:
    """Nearly whole numbers, no two of equal size among those that a rank chooses from."""
    gs = []
    for rank in range(ranks):
        random, rows = generator(seed, ranks, n, k, steps, rank), list[torch.Tensor]()
        for _ in range(steps):
            waiting = follow([torch.stack(rows)], k)[1][0] if rows else torch.zeros(n, dtype=F64)
            drawn = (random.permutation(n) + 1) * random.choice([-1, 1], n) * WIDE
            rows.append(torch.from_numpy(drawn) - waiting)
        gs.append(torch.stack(rows))
    text = f"{counted(ranks, 'rank')}, n = {n}, k = {k}, {counted(steps, 'step')}"
    means, memories = follow(gs, k)
    # What ranks send of one place comes together in one rank, and goes to the others.
    least = F64.itemsize * (ranks > 1) * sum(
        ranks * min(k, n) + (ranks - 2) * int(mean.count_nonzero()) for mean in means)
    wanted = Wanted([(means, memory, g.clone()) for memory, g in zip(memories, gs, strict=True)],
                    items=("mean of step", "memory", "g"), rtol=1e-12,
                    what="by what all ranks sent", least_bytes=least)
    return Case(text, [(g, k) for g in gs], harness=call, library=True, wanted=wanted,
                facts={"entries": min(k, n) * steps})


def _build(seed: int) -> list[Check]:
    more = varied(seed, 6)
    # So long that a dense all-reduce would send more.
    once = [_case(p, 60 + more, 4, 1, seed) for p in (1, 2, 3, 4, 8, 9, 13)]
    again = [_case(p, 40 + more, 3, 5, seed) for p in (1, 2, 3, 5, 8)]
    edges = [_case(3, 7, 7, 2, seed), _case(2, 5, 9, 2, seed), _case(4, 12 + more, 1, 3, seed)]
    return [
        Check("mean", 2, "1 to 13 ranks, one step", once, values),
        Check("memory", 3, "1 to 8 ranks, 5 steps", again, values),
        Check("edges", 1, "k = n, k > n, k = 1", edges, values),
        Check("bytes", 2, "2 to 13 ranks", [*once[1:], *again[1:]], sent_at_most(lambda case:
              (case.ranks - 1) * case.facts["entries"] * ENTRY, "(p−1)·k values and places"),
              values),
    ]


EXERCISE = Exercise("top-k", "Top-k with error feedback", "top_k_mean", _build,
                    library=WITH_COLLECTIVES)
