"""Chapter 04: every rank gets the root's vector, in ⌈lg p⌉ rounds."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises import _standard as standard
from dtlab.grading.exercises._standard import (
    BF16,
    F64,
    I64,
    broadcast_case,
    judge_broadcast,
    lg_ceil,
    real,
)

# Once root 0 works with every number of ranks:
RENUMBER = ("It works for root 0 only. Renumber the ranks: me = (comm.rank - root) % p is 0 at the "
            "root; where you send or receive, turn back: (… + root) % p.")
TWICE = ("A rank receives what it has already: each rank but the root receives x once, and no "
         "rank sends to the root.")


def _clue(case: Case, outcome: Outcome, rank: int) -> str:
    """Which mistake leaves just these vectors?"""
    before, after = [args[0] for args in case.args], [args[0] for args in outcome.after]
    if case.facts["root"] and all(torch.equal(x, before[0]) for x in after):
        return ("Every rank has rank 0's x. Renumber the ranks so that the root is 0: "
                "me = (comm.rank - root) % p; for send and recv, turn back: (… + root) % p.")
    if torch.equal(after[rank], before[rank]):
        return (f"Rank {rank} was never reached: its x is what it was. Every rank but the root "
                "receives once; a number of p or more is no rank.")
    return ("It holds another rank's x: a rank sent before it had received. A rank first "
            "receives from its parent, then sends to its children.")


_values = partial(judge_broadcast, clue=_clue)


def _rounds(case: Case, outcome: Outcome) -> Verdict:
    p = case.ranks
    own = outcome.trace.messages(case.facts["root"])
    busiest = max(outcome.trace.messages(rank) for rank in range(p))
    if outcome.trace.messages() > p - 1:
        clue = TWICE
    elif busiest > lg_ceil(p) or busiest == 1:  # one sends to all, or each to the next
        clue = ("One message follows the other. Every rank that has x must send it in the very "
                "next round, so that each round doubles the number of ranks that have it.")
    elif own < lg_ceil(p):
        clue = (f"The root sends only {own} times, and not in every round: each rank that has x "
                "sends it on in every round that is left, so that the ranks that have it double. "
                f"In a binomial tree of {p} ranks the root has ⌈lg p⌉ = {lg_ceil(p)} children.")
    else:
        clue = ("A rank starts too late. The child with the largest subtree has the most left to "
                "do: send to that one first. (In the animation's tree it is the farthest, in that "
                "of hint 1 the nearest.)")
    return standard.rounds(case, outcome, lg_ceil(p), "⌈lg p⌉", clue)


def _bytes(case: Case, outcome: Outcome) -> Verdict:
    least = (case.ranks - 1) * case.facts["nbytes"]
    sent = outcome.trace.sent_bytes()
    nbytes = f"{sent:,} / {least:,}"
    if sent == least:
        return Verdict(True, "x, once to each", "(p−1)·n in all", nbytes)
    return Verdict(False, f"{sent:,} B in all", f"(p−1)·n = {least:,} B", nbytes, clue=TWICE)


def _build(seed: int) -> list[Check]:
    def case(ranks: int, n: int = 6 + seed % 5, root: int = 0, **options: Any) -> Case:
        return broadcast_case(ranks, n, root, seed=seed, **options)

    plain = [case(p) for p in (4, 2, 8)]
    any_p = [case(p) for p in (1, 3, 5, 6, 7, 9, 13)]
    roots = [case(p, root=root, hint=RENUMBER) for p, root in (
        (4, 1), (8, 5), (2, 1), (3, 2), (5, 3), (6, 4), (7, 1), (9, 8), (13, 6))]
    kinds = [*(case(4, dtype=dtype) for dtype in (F64, I64, BF16)), case(4, 0), case(4, 1)]
    timed = [*plain, *any_p[1:], *roots]
    return [
        Check("values", 2, "2, 4, 8 ranks, root 0", plain, _values),
        Check("any p", 1, "1, 3, 5, 6, 7, 9, 13 ranks", any_p, _values,
              "It works for powers of two only. A child whose number is p or more does not "
              "exist: leave it out."),
        Check("any root", 2, "2 to 13 ranks, every kind of root", roots, _values),
        Check("any x", 1, "float64, int64, bfloat16; 0 and 1 elements", kinds, _values,
              "Receive straight into x, whatever its dtype and length."),
        Check("rounds", 2, "2 to 13 ranks, simulated", timed, _rounds, provided=_values),
        Check("bytes", 1, "2 to 13 ranks", timed, _bytes, provided=_values),
        real(case(4, 1000, 2, gloo=True), _values),
    ]


EXERCISE = Exercise("binomial-broadcast", "Binomial broadcast", "04", 1, "binomial_broadcast",
                    _build)
