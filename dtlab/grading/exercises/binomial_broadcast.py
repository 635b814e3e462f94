"""Chapter 04: every rank gets the root's vector, in ⌈lg p⌉ rounds."""

from __future__ import annotations

import torch

from dtlab.grading.case import Case, Outcome, describe_case
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises import _shared as shared
from dtlab.grading.exercises._shared import BF16, F32, F64, I64, lg_ceil
from dtlab.grading.exercises._standard import judge_broadcast, real


def _case(ranks: int, n: int, root: int = 0, dtype: torch.dtype = F32, seed: int = 0,
          gloo: bool = False) -> Case:
    args = [(shared.numbers((n,), dtype, 1000 * seed + 10 * ranks + rank), root)
            for rank in range(ranks)]
    facts = {"nbytes": n * dtype.itemsize, "root": root, "wanted": args[root][0].clone()}
    return Case(f"{describe_case(ranks, n, dtype)}, root {root}", args, facts=facts, gloo=gloo)


def _values(case: Case, outcome: Outcome) -> Verdict:
    return judge_broadcast(case, outcome, lambda rank: _clue(case, outcome, rank))


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


def _rounds(case: Case, outcome: Outcome) -> Verdict:
    p = case.ranks
    busiest = max(outcome.trace.messages(rank) for rank in range(p))
    if busiest > lg_ceil(p) or busiest == 1:  # one sends to all, or each to the next
        clue = ("One message follows the other. Every rank that has x must send it in the very "
                "next round, so that each round doubles the number of ranks that have it.")
    else:
        clue = ("A rank starts too late. The child with the largest subtree has the most left to "
                "do: send to the farthest child first.")
    return shared.rounds(case, outcome, lg_ceil(p), "⌈lg p⌉", clue)


def _bytes(case: Case, outcome: Outcome) -> Verdict:
    least = (case.ranks - 1) * case.facts["nbytes"]
    sent = outcome.trace.sent_bytes()
    nbytes = f"{sent:,} / {least:,}"
    if sent == least:
        return Verdict(True, "x, once to each", "(p−1)·n in all", nbytes)
    clue = ("A rank receives what it has already: each rank but the root receives x once, and "
            "no rank sends to the root." if sent > least else
            "Send x itself through comm, once to each rank.")
    return Verdict(False, f"{sent:,} B in all", f"(p−1)·n = {least:,} B", nbytes, clue=clue)


def _build(seed: int) -> list[Check]:
    n = 6 + seed % 5
    plain = [_case(p, n, seed=seed) for p in (4, 2, 8)]
    any_p = [_case(p, n, seed=seed) for p in (1, 3, 5, 6, 7, 9, 13)]
    roots = [_case(p, n, root, seed=seed)
             for p, root in ((4, 1), (8, 5), (2, 1), (3, 2), (5, 3), (6, 4), (7, 1), (9, 8), (13, 6))]
    kinds = [_case(4, n, dtype=dtype, seed=seed) for dtype in (F64, I64, BF16)]
    kinds += [_case(4, 0, seed=seed), _case(4, 1, seed=seed)]
    timed = [*plain, *any_p[1:], *roots]
    return [
        Check("values", 2, "2, 4, 8 ranks, root 0", plain, _values),
        Check("any p", 1, "1, 3, 5, 6, 7, 9, 13 ranks", any_p, _values,
              "It works for powers of two only. A child whose number is p or more does not "
              "exist: leave it out."),
        Check("any root", 2, "2 to 13 ranks, every kind of root", roots, _values,
              "It works for root 0 only. Renumber the ranks: me = (comm.rank - root) % p is 0 at "
              "the root; where you send or receive, turn back: (… + root) % p."),
        Check("any x", 1, "float64, int64, bfloat16; 0 and 1 elements", kinds, _values,
              "Receive straight into x, whatever its dtype and length."),
        Check("rounds", 2, "2 to 13 ranks, simulated", timed, _rounds, provided=_values),
        Check("bytes", 1, "2 to 13 ranks", timed, _bytes, provided=_values),
        real(_case(4, 1000, 2, seed=seed, gloo=True), _values),
    ]


EXERCISE = Exercise("binomial-broadcast", "Binomial broadcast", "04", 1, "binomial_broadcast",
                    _build)
