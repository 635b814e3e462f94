"""Chapter 05: the ring, judged by what it moves and what it keeps, not only by its sums."""

from __future__ import annotations

import torch

from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._all_reduce import (
    DTYPES,
    F32,
    judge_sums,
    summing_case,
    too_large,
)
from dtlab.grading.exercises._standard import NO_SUCH_PIECE, held_at_most, rounds, sent_at_most

# ---- values ------------------------------------------------------------------------------------


def _values(case: Case, outcome: Outcome) -> Verdict:
    return judge_sums(case, outcome, _chunk_clue)


def _chunk_clue(case: Case, outcome: Outcome, after: list[torch.Tensor]) -> str:
    """Look at the vectors piece by piece, cut as tensor_split cuts them."""
    total, p = case.facts["total"], case.ranks
    before = [args[0] for args in case.args]
    if p > 2 and all(dst == (src - 1) % p for src, dst in outcome.trace.bytes_by_pair()):
        return ("Every rank sends to its left. In this order of chunks, rank r sends to its right, "
                "(r + 1) % p, and receives from its left, (r - 1) % p.")
    if p > 2 and all(bool(((x == total) | (x == mine)).all()) and not torch.equal(x, mine)
                     for x, mine in zip(after, before, strict=True)):
        return ("Some chunks of x hold the sum, all others what they held at the start: the sums "
                "are in new tensors. `chunk = chunk + inbox` makes one, and leaves x as it was; "
                "`chunk.add_(inbox)` and `comm.accumulate_(chunk, inbox)` change x.")
    wanted = total.tensor_split(p)
    done = [[torch.equal(a, b) for a, b in zip(x.tensor_split(p), wanted, strict=True)]
            for x in after]
    complete = [sum(row) for row in done]
    if all(torch.equal(x, after[0]) for x in after):
        bare = all(any(torch.equal(a, x.tensor_split(p)[b]) for x in before)
                   for b, a in enumerate(after[0].tensor_split(p)))
        what = "each chunk is what one rank had at the start" if bare else "not on the sum"
        return (f"All ranks agree, but {what}: the all-gather hands out chunks that aren't "
                "complete. Either the first phase is wrong (in step s rank r sends chunk r − s, "
                "and adds what comes, once it has come, to chunk r − s − 1), or the second begins "
                "with another chunk than the complete one, r + 1.")
    if too_large(after, total):
        return ("Some sums are too large. Is something added twice (in the second phase, "
                "overwrite, don't add), or is a chunk received into another one? In step s of the "
                "first phase rank r sends chunk r − s, and adds what comes to chunk r − s − 1.")
    reduced = all(map(torch.equal, after, _after_first_phase(before)))
    if reduced and outcome.trace.messages() >= 2 * p * (p - 1):
        return ("Each rank holds one complete chunk, and the others were sent on, but what arrived "
                "is not in x: receive straight into the chunk of x, or copy it there "
                "(`chunks[b][:] = inbox`); `chunks[b] = inbox` only renames the inbox.")
    if reduced:
        return ("Each rank holds one complete chunk: the first phase is right. Now send the "
                "complete chunks round the ring (the all-gather phase).")
    if all(c == p - 1 for c in complete):
        return ("On every rank just one chunk is wrong. That is an off-by-one: each phase has p − "
                "1 steps, and after the first, rank r holds the complete chunk r + 1.")
    if sum(complete) and len(set(complete)) == 1:
        return ("Some chunks are complete and others not: which chunk do you send in step s of the "
                "all-gather? Begin with the one that is complete here, chunk r + 1, then pass on "
                "what came in the step before.")
    return ("Some contributions are missing. In step s of the first phase rank r sends chunk r − s "
            "and adds what comes to chunk r − s − 1.")


def _after_first_phase(before: list[torch.Tensor]) -> list[torch.Tensor]:
    """Chunk b on rank r: what ranks b to r, round the ring, have added to it."""
    p, pieces = len(before), [x.tensor_split(len(before)) for x in before]
    return [torch.cat([torch.stack([pieces[(b + i) % p][b] for i in range((r - b) % p + 1)]).sum(0)
                       for b in range(p)]).to(before[r].dtype) for r in range(p)]


# ---- cost --------------------------------------------------------------------------------------


def _bytes(case: Case, outcome: Outcome) -> Verdict:
    """At most 2(p−1)⌈n/p⌉ elements from each rank."""
    p, n, item = case.ranks, case.facts["n"], case.facts["item"]
    allowed = 2 * (p - 1) * -(-n // p) * item
    return sent_at_most(case, outcome, allowed, "2(p−1)·⌈n/p⌉ elements",
                        lambda sent: _byte_clue(sent, p, n * item, allowed))


def _byte_clue(sent: list[int], p: int, whole: int, allowed: int) -> str:
    if max(sent) > 2 * sorted(sent)[-2]:
        return (f"Rank {sent.index(max(sent))} sends far more than the others: everything passes "
                "through it. In a ring all ranks do the same.")
    if min(sent) >= (p - 1) * whole:
        return ("The whole vector goes out in every step. Cut it into p chunks "
                "(x.tensor_split(p)) and send one chunk a step: 2(p−1) steps of n/p.")
    if max(sent) <= allowed * p / (p - 1) + whole / p:
        return "A step too many: each of the two phases needs p − 1 steps, not p."
    return "A ring sends one chunk of n/p a step, in 2(p − 1) steps."


def _rounds(case: Case, outcome: Outcome) -> Verdict:
    allowed = 2 * (case.ranks - 1)
    clue = "A few steps too many: each of the two phases needs p − 1 steps."
    if outcome.elapsed_s >= 1.5 * allowed:
        clue = ("Some ranks wait while others talk. Let every rank send to the right and receive "
                "from the left in the same step: comm.sendrecv(chunk, right, inbox, left).")
    return rounds(case, outcome, allowed, "2(p−1)", clue)


def _memory(case: Case, outcome: Outcome) -> Verdict:
    """One chunk on top of x: ⌈n/p⌉ elements."""
    p, n, item = case.ranks, case.facts["n"], case.facts["item"]
    return held_at_most(outcome, -(-n // p) * item, ": one chunk", lambda held: (
        "A whole copy of x is made (clone, cat, stack, x + …, tolist). Add and overwrite in "
        "place: chunks from x.tensor_split(p) are views of x." if max(held) >= n * item else
        "More than one chunk is held. One inbox is enough: make it once, before the loop; "
        "chunks of x can be sent, and in the second phase received into, as they are."))


def _build(seed: int) -> list[Check]:
    def cases(*what: tuple[int, int], hint: str = "") -> list[Case]:
        more = seed % 3  # other sizes, but as divisible as before
        return [summing_case(p, n + more * p if n >= p else n, F32, seed, hint=hint,
                             errors=NO_SUCH_PIECE)
                for p, n in what]

    plain = cases((4, 8), (2, 4), (8, 32))
    any_p = cases((1, 5), (3, 6), (5, 10), (6, 12), (7, 7), (9, 18), (13, 26))
    uneven = cases((4, 10), (2, 5), (8, 27), (4, 3), (8, 1), (4, 0))
    both = cases((3, 7), (9, 30), (5, 3), hint="The number of ranks and the length are both odd "
                 "here; each alone works.")
    dtypes = [summing_case(4, 8, dtype, seed) for dtype in DTYPES]
    timed = [*plain, *uneven, *any_p[1:]]
    large = [summing_case(4, 192_000, F32, seed, meter=True)]
    real = [summing_case(4, 1_000, F32, seed, gloo=True)]
    return [
        Check("sums", 2, "2, 4, 8 ranks", plain, _values),
        Check("any p", 1, "1, 3, 5, 6, 7, 9, 13 ranks", any_p, _values,
              "It works for some numbers of ranks only: a ring needs no power of two."),
        Check("any n", 1, "n not a multiple of p; n < p; n = 0", [*uneven, *both], _values,
              "It fails where p does not divide n. x.tensor_split(p) cuts any n: sizes differ by "
              "one element at most, and may be 0; cut your inbox to the size of what comes."),
        Check("any dtype", 1, "float64, bfloat16, complex, integers", dtypes, _values,
              "It works for float32 only: make the inbox with torch.empty_like, or dtype=x.dtype."),
        Check("bytes", 2, "2 to 13 ranks", timed, _bytes, provided=_values),
        Check("rounds", 1, "2 to 13 ranks, simulated", timed, _rounds, provided=_values),
        Check("memory", 1, "4 ranks, 192000 × float32", large, _memory, provided=_values),
        Check("real", 1, "4 processes over Gloo", real, _values,
              "It works in the simulator, but not as a ring of real processes over Gloo."),
    ]


EXERCISE = Exercise("ring-all-reduce", "Ring all-reduce", "05", 1, "ring_all_reduce", _build)
