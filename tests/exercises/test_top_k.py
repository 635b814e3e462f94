"""Right and wrong answers to the exercise of chapter 08b."""

from __future__ import annotations

import pytest
import torch

from dtlab.collectives import all_gather, all_reduce
from tests.exercises.answers import first_hint, judged, lost, solutions

MEAN, MEMORY, EDGES, BYTES = "mean", "memory", "edges", "bytes"


def answer(*, signed=False, rebinds=False, memory_used=True, removes="sent", overwrites=False,
           divides=True, clamps=True, dense=False, spoils=False, forgets=False, signs=True,
           short=False):
    """A right answer, with places to break it."""
    def top_k_mean(comm, g, memory, k):
        if spoils:
            g += memory
            memory.copy_(g)
        elif forgets:
            memory.copy_(g)
        elif rebinds:
            memory = memory + g
        elif memory_used:
            memory += g
        x = memory if memory_used else g
        k = min(k, len(g)) if clamps else k
        places = (x if signed else x.abs()).topk(k).indices
        values, total = x[places] if signs else x[places].abs(), torch.zeros_like(g)
        if dense:
            total[places] = values
            all_reduce(comm, total)
        else:
            pairs = zip(all_gather(comm, places), all_gather(comm, values), strict=True)
            for where, what in pairs:
                total[where] = what if overwrites else total[where] + what
        mean = total / comm.size if divides else total
        if removes == "sent" and memory_used:
            memory[places] = 0
        elif removes == "mean":
            memory -= mean
        elif removes == "all":
            memory.zero_()
        return mean[places] if short else mean

    return top_k_mean


@pytest.mark.parametrize("seed", [0, 2])
def test_right_answers_earn_all(seed: int) -> None:
    assert judged("top-k", answer(), seed).points == 8
    assert judged("top-k", solutions()["top_k_mean"], seed).points == 8


@pytest.mark.parametrize(("wrong", "rows", "hint"), [
    (answer(divides=False), {MEAN, MEMORY, EDGES, BYTES}, "divide by comm.size"),
    (answer(signed=True), {MEAN, MEMORY, EDGES, BYTES}, "largest absolute value"),
    (answer(signs=False), {MEAN, MEMORY, EDGES, BYTES}, "has lost its signs"),
    (answer(removes="all"), {MEAN, MEMORY, EDGES, BYTES}, "set to 0 only the places that you sent"),
    (answer(short=True), {MEAN, MEMORY, EDGES, BYTES}, "a whole vector like g"),
    (answer(overwrites=True), {MEAN, MEMORY, EDGES, BYTES}, "same place"),
    (answer(memory_used=False), {MEAN, MEMORY, EDGES, BYTES}, "what isn't sent is lost"),
    (answer(rebinds=True), {MEAN, MEMORY, EDGES, BYTES}, "makes a new one"),
    (answer(forgets=True), {MEMORY, EDGES}, "don't overwrite it"),
    (answer(removes="nothing"), {MEAN, MEMORY, EDGES, BYTES}, "will be sent again"),
    (answer(removes="mean"), {MEAN, MEMORY, EDGES, BYTES}, "what *this* rank sent"),
    (answer(clamps=False), {EDGES}, "k = min(k, len(g))"),
    (answer(dense=True), {BYTES}, "not a whole vector"),
    (answer(spoils=True), {MEMORY, EDGES}, "g belongs to the caller"),
], ids=["sum", "signed", "no signs", "empties", "k values", "overwrites", "no memory", "rebinds",
        "forgets", "sends again", "removes the mean", "k too large", "dense", "changes g"])
def test_a_mistake_costs_points_and_is_named(wrong, rows: set[str], hint: str) -> None:
    report = judged("top-k", wrong)
    assert lost(report) >= rows - {BYTES}
    assert (BYTES in lost(report)) == (BYTES in rows)
    assert hint in first_hint(report)


def test_k_is_blamed_only_where_it_is_larger_than_the_vector() -> None:
    assert len(judged("top-k", answer(forgets=True)).hints) == 1
