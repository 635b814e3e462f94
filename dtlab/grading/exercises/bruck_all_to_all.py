"""Chapter 04: a part from every rank to every rank, in ⌈lg p⌉ rounds."""

from __future__ import annotations

import torch

from dtlab.grading.case import Case, Outcome, counted, describe_case
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises import _standard as standard
from dtlab.grading.exercises._standard import BF16, F32, F64, I64, lg_ceil, real, sent_at_most


def _case(ranks: int, shape: tuple[int, ...], dtype: torch.dtype = F32, seed: int = 0,
          gloo: bool = False) -> Case:
    args = [(standard.numbers((ranks, *shape), dtype, 1000 * seed + 10 * ranks + rank),)
            for rank in range(ranks)]
    return Case(describe_case(ranks, (ranks, *shape), dtype), args, gloo=gloo,
                facts={"part": args[0][0][0].nbytes})


def _wanted(case: Case, rank: int) -> torch.Tensor:
    return torch.stack([args[0][rank] for args in case.args])


def _values(case: Case, outcome: Outcome) -> Verdict:
    for rank, value in enumerate(outcome.values):
        if wrong := standard.compare(f"rank {rank}: result", value, _wanted(case, rank),
                                     "what the row's rank has for this rank", ""):
            return wrong._replace(clue=_clue(case, outcome, rank))
        if not torch.equal(outcome.after[rank][0], case.args[rank][0]):
            return Verdict(False, f"rank {rank}: parts was changed", "parts as it was",
                           clue="parts belongs to the caller: let the parts travel in a copy "
                                "(parts.roll makes one; parts[…] = … does not).")
    right = Verdict(True, "row s is rank s's parts[r]", "row s is rank s's parts[r]")
    return standard.not_sent(outcome, case.ranks * (case.ranks - 1) * case.facts["part"]) or right


def _clue(case: Case, outcome: Outcome, rank: int) -> str:
    """Are the right rows there, in another order? Then which?"""
    p, wanted, value = case.ranks, _wanted(case, rank), outcome.values[rank]
    if not isinstance(value, torch.Tensor) or value.shape != wanted.shape:
        return "Return a tensor of the shape of parts: row s is what rank s has for this rank."
    rows = sorted(map(str, value.tolist()))
    if rows == sorted(map(str, case.args[rank][0].tolist())):
        return ("The result holds this rank's own parts only: what arrived is not in it. `m[rows]` "
                "with a list of rows is a copy, and what is received into a copy is lost: receive "
                "into a tensor of its own, then write it back, `m[rows] = arrived`.")
    unturned = [_wanted(case, r)[[(r - d) % p for d in range(p)]] for r in range(p)]
    if all(standard.compare("", row, rows, "", "") is None
           for row, rows in zip(outcome.values, unturned, strict=True)):
        return ("Only the last turn is missing: row d has come from d ranks back, so it belongs "
                "into row (r − d) % p of the result.")
    for turn in range(1, p):
        if torch.equal(value, wanted.roll(turn, 0)):
            by = turn if turn <= p // 2 else turn - p
            return (f"All parts have come, but the rows stand {abs(by)} too far "
                    f"{'down' if by > 0 else 'up'}: after the rounds, row d has come from rank "
                    "(r − d) % p.")
    if rows == sorted(map(str, wanted.tolist())):
        return ("All parts have come, in the wrong order: row d has come from d ranks back, from "
                "rank (r − d) % p. That order runs backwards; a roll alone does not reverse it.")
    return ("Some parts are not for this rank. At the start row d is for the rank d further on: "
            "parts.roll(-r, 0). In the round of hop 2^k, the rows whose d has that bit move 2^k "
            "ranks ahead, and what comes takes their places.")


def _rounds(case: Case, outcome: Outcome) -> Verdict:
    return standard.rounds(case, outcome, lg_ceil(case.ranks), "⌈lg p⌉", (
        f"{case.ranks} ranks took {counted(outcome.elapsed_s, 'round')}. Sending each part "
        "straight to its rank takes p − 1. Let parts hop 1, 2, 4, … ranks ahead, many in one "
        "message: one sendrecv per round."))


def _bytes(case: Case, outcome: Outcome) -> Verdict:
    p, part = case.ranks, case.facts["part"]
    return sent_at_most(case, outcome, p * lg_ceil(p) // 2 * part, "n/2·⌈lg p⌉", lambda sent: (
        "All parts leave in every round. In the round of hop 2^k only those move whose distance d "
        "has the bit 2^k: half of them." if max(sent) >= lg_ceil(p) * (p - 1) * part else
        "In the round of hop 2^k, only rows d with d & 2^k move: half of them, or fewer."))


def _build(seed: int) -> list[Check]:
    n = 3 + seed % 4
    plain = [_case(p, (n,), seed=seed) for p in (4, 2, 8)]
    any_p = [_case(p, (n,), seed=seed) for p in (1, 3, 5, 6, 7, 9, 13)]
    kinds = [_case(4, shape, dtype, seed) for shape, dtype in (
        ((2, 3), F32), ((), F32), ((0,), F32), ((n,), F64), ((n,), I64), ((n,), BF16))]
    timed = [*plain, *any_p[1:]]
    return [
        Check("values", 2, "2, 4, 8 ranks", plain, _values),
        Check("any p", 2, "1, 3, 5, 6, 7, 9, 13 ranks", any_p, _values,
              "It works for powers of two only. Bruck's hops go (r + 2^k) % p, for any p; partners "
              "r ^ 2^k exist for powers of two only."),
        Check("any parts", 1, "2-d parts, numbers, empty; float64, int64, bfloat16", kinds, _values,
              "parts has shape (p, …), any dtype, and may be empty: torch.empty_like makes a "
              "buffer for what arrives."),
        Check("rounds", 2, "2 to 13 ranks, simulated", timed, _rounds, provided=_values),
        Check("bytes", 2, "2 to 13 ranks", timed, _bytes, provided=_values),
        real(_case(4, (250,), seed=seed, gloo=True), _values),
    ]


EXERCISE = Exercise("bruck-all-to-all", "Bruck's all-to-all", "04", 4, "bruck_all_to_all", _build)
