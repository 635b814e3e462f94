"""Chapter 08b: top-k with error feedback: the mean of what was sent, and what stays in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dtlab.comm import Comm
from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Exercise, Verdict

F64 = torch.float64
ENTRY = 16  # bytes: a float64 and an int64


class Rule(NamedTuple):
    """The right way (as it is by default), and the ways in which learners get it wrong."""

    signed: bool = False  # the largest, not the largest in absolute value
    signs: bool = True  # what is sent has its sign
    from_memory: bool = True  # what is sent comes out of g + memory, not out of g alone
    keeps: bool = True  # the memory takes what is not sent
    adds_up: bool = True  # to what it has; otherwise that is overwritten
    removes: str = "sent"  # what leaves the memory: "sent", "mean" or "nothing"
    adds: bool = True  # equal places of several ranks are added, not overwritten
    divides: bool = True  # the mean, not the sum


RIGHT = Rule()
MISTAKES = {
    Rule(divides=False): "That is the sum over the ranks: divide by comm.size.",
    Rule(signed=True): "The largest are those of largest absolute value: x.abs().topk(k), then "
                       "x at these places, with their signs.",
    Rule(signs=False): "What was sent has lost its signs: take only the places from "
                       "x.abs().topk(k), and the values from x.",
    Rule(adds=False): "Two ranks may send the same place, and their values must be added: "
                      "total[places] = values overwrites. Take total.index_add_(0, places, "
                      "values), or add one rank after the other.",
    Rule(keeps=False): "The memory ends as it began, so what isn't sent is lost. `memory += g` "
                       "changes the tensor that you were given; `memory = memory + g` makes a new "
                       "one. Choose from the sum, and set to 0 only the places that you sent.",
    Rule(adds_up=False): "What was not sent in earlier calls is gone: memory += g, don't overwrite "
                         "it.",
    Rule(removes="nothing"): "What was sent is still in the memory, and will be sent again: set "
                             "the memory to 0 at the places that you sent.",
    Rule(removes="mean"): "What leaves the memory is what *this* rank sent, not the mean.",
    Rule(from_memory=False): "Choose from g + memory, not from g alone: what waits in the memory "
                             "must be sent as well, once it is large.",
}


def follow(gs: list[torch.Tensor], k: int, rule: Rule = RIGHT
           ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """gs[rank]: (steps, n). The mean of each step, and each rank's memory in the end."""
    memories, means = [torch.zeros_like(g[0]) for g in gs], []
    for step in range(len(gs[0])):
        total, sent = torch.zeros_like(memories[0]), []
        for g, memory in zip(gs, memories, strict=True):
            if not rule.adds_up:
                memory.zero_()
            x = g[step] + memory if rule.from_memory else g[step]
            places = (x if rule.signed else x.abs()).topk(min(k, len(x))).indices
            values = x[places] if rule.signs else x[places].abs()
            total[places] = values + (total[places] if rule.adds else 0)
            sent.append((places, x[places]))
        means.append(total / len(gs) if rule.divides else total)
        for g, memory, (places, values) in zip(gs, memories, sent, strict=True):
            if rule.keeps:
                memory += g[step]
                if rule.removes == "sent":
                    memory[places] -= values
                elif rule.removes == "mean":
                    memory -= means[-1]
    return means, memories


def call(function: Callable[..., Any], comm: Comm, gs: torch.Tensor, k: int) -> tuple[Any, ...]:
    """In the sandbox: what each step returned, and the memory in the end."""
    memory = torch.zeros_like(gs[0])
    means = [function(comm, g, memory, k) for g in gs]
    return [m.clone() if isinstance(m, torch.Tensor) else repr(m)[:60] for m in means], memory


def _case(ranks: int, n: int, k: int, steps: int, seed: int, hint: str = "") -> Case:
    """Whole numbers, no two of equal size among those that a rank chooses from."""
    random = torch.Generator().manual_seed(1000 * seed + 10 * ranks + n + steps)
    gs = []
    for _ in range(ranks):
        rows: list[torch.Tensor] = []
        for _ in range(steps):
            waiting = follow([torch.stack(rows)], k)[1][0] if rows else torch.zeros(n, dtype=F64)
            signs = torch.randint(0, 2, (n,), generator=random) * 2 - 1
            rows.append((torch.randperm(n, generator=random) + 1) * signs - waiting)
        gs.append(torch.stack(rows))
    text = f"{ranks} rank{'s' * (ranks > 1)}, n = {n}, k = {k}, {steps} step{'s' * (steps > 1)}"
    return Case(text, [(g, k) for g in gs], harness=call, library=True,
                hint=hint, facts={"gs": [g.clone() for g in gs], "k": k})


def _values(case: Case, outcome: Outcome) -> Verdict:
    gs, k, told = case.facts["gs"], case.facts["k"], "the mean of what all ranks sent"
    means, memories = follow(gs, k)
    for rank, (came, memory) in enumerate(outcome.values):
        for step, (one, mean) in enumerate(zip(came, means, strict=True)):
            if not isinstance(one, torch.Tensor):
                return Verdict(False, f"rank {rank} returned {one}", "a tensor",
                               clue="Return the mean, a tensor like g.")
            if one.shape != mean.shape:
                return Verdict(False, f"rank {rank} returned {tuple(one.shape)}",
                               f"{tuple(mean.shape)}", clue="Return a whole vector like g, with 0 "
                               "where no rank has sent.")
            if not _close(one, mean):
                return Verdict(False, f"rank {rank}, step {step + 1}: another mean", told,
                               clue=_clue(case, outcome))
        if not _close(memory, memories[rank]):
            return Verdict(False, f"rank {rank}: another memory", "g + memory − what it sent",
                           clue=_clue(case, outcome))
        if not torch.equal(outcome.after[rank][0], gs[rank]):
            return Verdict(False, f"rank {rank}'s g was changed", "g as it was",
                           clue="g belongs to the caller: change only the memory.", sure=True)
    return Verdict(True, "right on every rank", told)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.to(F64), other, rtol=1e-12, atol=1e-9)


def _clue(case: Case, outcome: Outcome) -> str:
    """Which mistake makes just these numbers?"""
    for rule, clue in MISTAKES.items():
        means, memories = follow(case.facts["gs"], case.facts["k"], rule)
        as_means = all(isinstance(one, torch.Tensor) and _close(one, mean)
                       for came, _ in outcome.values for one, mean in zip(came, means, strict=True))
        if as_means and all(_close(memory, kept)
                            for (_, memory), kept in zip(outcome.values, memories, strict=True)):
            return clue
    return "memory += g; send its k largest entries and their places; set these to 0 in the memory."


def _bytes(case: Case, outcome: Outcome) -> Verdict:
    steps, n = case.facts["gs"][0].shape
    allowed = (case.ranks - 1) * min(case.facts["k"], n) * ENTRY * steps
    most = max(outcome.trace.sent_bytes(rank) for rank in range(case.ranks))
    nbytes, wanted = f"{most:,} / {allowed:,}", "≤ (p−1)·k values and places a rank"
    if most <= allowed:
        return Verdict(True, "k entries to each other rank", wanted, nbytes)
    return Verdict(False, f"a rank sent {most:,} B", wanted, nbytes,
                   clue="Send only k values and their k places (all_gather), not a whole vector.")


def _build(seed: int) -> list[Check]:
    more = seed % 3
    once = [_case(p, 20 + more, 4, 1, seed) for p in (1, 2, 3, 4, 8, 9, 13)]
    again = [_case(p, 16 + more, 3, 5, seed) for p in (1, 2, 3, 5, 8)]
    edges = [_case(3, 7, 7, 2, seed), _case(2, 5, 9, 2, seed, "If k is larger than the vector, "
                                            "send all of it: k = min(k, len(g))."),
             _case(4, 12 + more, 1, 3, seed)]
    return [
        Check("mean", 2, "1 to 13 ranks, one step", once, _values),
        Check("memory", 3, "1 to 8 ranks, 5 steps", again, _values),
        Check("edges", 1, "k = n, k > n, k = 1", edges, _values),
        Check("bytes", 2, "2 to 13 ranks", [*once[1:], *again[1:]], _bytes, provided=_values),
    ]


EXERCISE = Exercise("top-k", "Top-k with error feedback", "08", 3, "top_k_mean", _build)
