"""Chapter 05: halving and doubling, judged by its bytes and its rounds, for any number of ranks."""

from __future__ import annotations

import torch

from dtlab.grading.case import Case, Outcome, counted
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._all_reduce import (
    DTYPES,
    F32,
    judge_sums,
    least_bytes,
    summing_case,
    too_large,
)
from dtlab.grading.exercises._standard import NO_SUCH_PIECE, held_at_most, real


def _core(ranks: int) -> tuple[int, int, int]:
    """The largest power of two that is at most `ranks`, its logarithm, the ranks beyond it."""
    lg = ranks.bit_length() - 1
    return 1 << lg, lg, ranks - (1 << lg)


# ---- values ------------------------------------------------------------------------------------


def _values(case: Case, outcome: Outcome) -> Verdict:
    verdict = judge_sums(case, outcome, _clue)
    folding = _folding_clue(case, [args[0] for args in outcome.after])
    return verdict._replace(sure=verdict.clue == folding != "")


def _folding_clue(case: Case, after: list[torch.Tensor]) -> str:
    """Who was left out, before the first round or after the last?"""
    total, p = case.facts["total"], case.ranks
    core, _, extra = _core(p)
    before = [args[0] for args in case.args]
    done = [torch.equal(x, total) for x in after]
    untouched = [torch.equal(a, b) for a, b in zip(after, before, strict=True)]
    if extra and sum(done) == core:
        rank = done.index(False)
        holds = "still holds what it began with" if untouched[rank] else "does not hold the sum"
        return (f"Rank {rank} {holds}: after the last round, the neighbour of a folded rank must "
                "hand the sum back to it.")
    if extra and torch.equal(after[0], torch.stack(before[:core]).sum(0).to(total.dtype)):
        ranks = f"ranks {core} to {p - 1}" if extra > 1 else f"rank {core}"
        return (f"The contributions of {ranks} are missing: with p = {p}, fold {extra} of the "
                "ranks into neighbours before the first round.")
    return ""


def _clue(case: Case, outcome: Outcome, after: list[torch.Tensor]) -> str:
    """An element is complete on a rank or isn't: who has how many tells what went wrong."""
    total = case.facts["total"]
    complete = [x == total for x in after]
    agree = all(torch.equal(x, after[0]) for x in after)
    if agree and too_large(after, total) and bool((after[0].abs() < total.abs()).any()):
        return ("Elements of one half are added to those of the other: a rank sends the half that "
                "it keeps. Send the half that you give away; your partner keeps that one.")
    if too_large(after, total):
        return ("Some sums are too large. Is something added twice (on the way back, the doubling, "
                "overwrite, don't add), or added where it does not belong? Of two partners one "
                "keeps the first half, the other the second; each sends what the other keeps.")
    folding = _folding_clue(case, after)
    if folding:
        return folding
    before = torch.stack([args[0] for args in case.args])
    if agree and bool((before == after[0]).any(0).all()):
        return ("Nothing has been added: each element is what some rank held at the start. On the "
                "way there (the halving) add what comes to the half that you keep; overwrite only "
                "on the way back.")
    held = torch.stack(complete).sum(0)
    if bool((held >= 1).all()):
        return ("Every element is complete on some rank: the halving is right. Now go the same way "
                "back: swap complete pieces with the same partners, the nearest first.")
    if agree:
        return ("All ranks agree, but not on the sum: pieces were handed out before they were "
                "complete. Halve until one piece is left, then double.")
    return ("Some contributions are missing. In each round, you and your partner hold the same "
            "piece: one keeps (and adds) its first half, the other its second; the next round "
            "halves what was kept. Does the half that you send lie just where your partner adds "
            "it?")


# ---- cost --------------------------------------------------------------------------------------


def _bytes(case: Case, outcome: Outcome) -> Verdict:
    """The bound in all; of one rank, 2(p′−1)⌈n/p′⌉ elements, and one vector more if ranks fold."""
    core, _, extra = _core(case.ranks)
    n, item = case.facts["n"], case.facts["item"]
    allowed = (2 * (core - 1) * -(-n // core) + (n if extra else 0)) * item
    sent = [outcome.trace.sent_bytes(rank) for rank in range(case.ranks)]
    most, least = max(sent), least_bytes(case)
    nbytes = f"{most:,} / {allowed:,}"
    if most > allowed:
        return Verdict(False, f"rank {sent.index(most)} sent {most:,} B", f"≤ {allowed:,} B a rank",
                       nbytes, clue=_byte_clue(case, sent))
    if sum(sent) > least:
        return Verdict(False, f"{sum(sent):,} B in all", f"{least:,} B in all", nbytes,
                       clue=_byte_clue(case, sent))
    expected = "2(p′−1)/p′·n" + (" + n" if extra else "") + " a rank"
    return Verdict(True, "as few as can be", expected, nbytes)


def _byte_clue(case: Case, sent: list[int]) -> str:
    _, lg, _ = _core(case.ranks)
    whole = case.facts["n"] * case.facts["item"]
    if lg > 1 and min(sent) >= lg * whole:
        return ("The whole vector goes out in every round: that is recursive doubling. Send only "
                "the half that you don't keep, then half of that half, …")
    if max(sent) > 2 * sorted(sent)[-2]:
        return (f"Rank {sent.index(max(sent))} sends far more than the others: everything passes "
                "through it.")
    return ("Round k moves n/2ᵏ: first one half of x, then one half of what was kept. The way back "
            "moves as much.")


def _rounds(case: Case, outcome: Outcome) -> Verdict:
    """One second a message and infinite bandwidth: the virtual time counts the rounds."""
    _, lg, extra = _core(case.ranks)
    allowed = 2 * lg + (2 if extra else 0)
    took = outcome.elapsed_s
    rounds, limit = f"{took:g} / {allowed}", f"≤ {counted(allowed, 'round')}"
    if took <= allowed + 1e-9:
        return Verdict(True, counted(took, "round"), limit, rounds=rounds)
    if max(outcome.trace.messages(rank) for rank in range(case.ranks)) > allowed:
        clue = ("More messages than rounds are allowed, as in a ring. Here the distance to the "
                "partner changes by a factor of two from round to round: lg p rounds there, lg "
                "p back.")
    else:
        clue = ("Some ranks wait while others talk: in each round, send and receive at once, with "
                "comm.sendrecv(give, partner, inbox, partner).")
    return Verdict(False, counted(took, "round"), limit, rounds=rounds, clue=clue)


def _memory(case: Case, outcome: Outcome) -> Verdict:
    """Half a vector for the first round's inbox; where a rank takes in a neighbour's, all of it."""
    n, item = case.facts["n"], case.facts["item"]
    room = (n if _core(case.ranks)[2] else -(-n // 2)) * item
    return held_at_most(outcome, room, "", (
        "More is held than the largest message that arrives: half of x; all of x only on a rank "
        "that takes in a neighbour. Make one inbox of that size, once, and use slices of it; "
        "pieces of x can be sent, and on the way back received into, as they are."))


def _build(seed: int) -> list[Check]:
    def cases(*what: tuple[int, int], hint: str = "") -> list[Case]:
        more = seed % 3  # other sizes, but as divisible as before
        return [summing_case(p, n + more * _core(p)[0] if n >= p else n, F32, seed, hint=hint,
                             errors=NO_SUCH_PIECE)
                for p, n in what]

    plain = cases((4, 8), (2, 4), (8, 32))
    any_p = cases((1, 4), (3, 4), (6, 8), (5, 8), (7, 8), (9, 16), (13, 16))
    uneven = cases((4, 10), (2, 5), (8, 27), (4, 3), (8, 5), (8, 1), (4, 0))
    both = cases((3, 7), (6, 9), (13, 30), (5, 3), hint="The number of ranks is no power of two "
                 "and the length is odd here; each alone works.")
    dtypes = [summing_case(4, 8, dtype, seed) for dtype in DTYPES]
    timed = [*plain, *uneven[:-1], *any_p[1:], *both]
    large = [summing_case(p, 96_000, F32, seed, meter=True) for p in (4, 6)]
    return [
        Check("sums", 1, "2, 4, 8 ranks", plain, _values),
        Check("any p", 2, "1, 3, 5, 6, 7, 9, 13 ranks", any_p, _values,
              "It works for powers of two only: with other numbers, rank ^ distance may be no rank "
              "at all. Fold p − p′ of the ranks into neighbours first, and hand them the sum at "
              "the end."),
        Check("any n", 1, "uneven halves; n < p; n = 0", [*uneven, *both], _values,
              "It fails where halves differ in size. Both partners must cut at the same place: "
              "compute the edges of a piece the same way on both sides, and cut your inbox to the "
              "size of what comes."),
        Check("any dtype", 1, "float64, bfloat16, complex, integers", dtypes, _values,
              "It works for float32 only: make the inbox with torch.empty_like, or dtype=x.dtype."),
        Check("bytes", 2, "2 to 13 ranks", timed, _bytes, provided=_values),
        Check("rounds", 1, "2 to 13 ranks, simulated", timed, _rounds, provided=_values),
        Check("memory", 1, "4 and 6 ranks, 96000 × float32", large, _memory, provided=_values),
        real(summing_case(5, 1_000, F32, seed, gloo=True), _values),
    ]


EXERCISE = Exercise("halving-doubling", "Halving and doubling", "05", 2, "halving_doubling",
                    _build)
