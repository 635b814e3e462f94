"""The cases and checks that many exercises share: values, bytes, rounds, memory, real processes.
An exercise's own are its bounds and its clues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtlab.grading.case import Case, Outcome, counted, describe_case
from dtlab.grading.exercise import Check, Verdict
from dtlab.grading.frames import Opaque

F32, F64, BF16, I64 = torch.float32, torch.float64, torch.bfloat16, torch.int64


def lg_ceil(p: int) -> int:
    """⌈lg p⌉."""
    return (p - 1).bit_length()


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Whole numbers from 1 to 99, in any dtype exact."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(1, 100, shape, generator=random).to(dtype)


def not_sent(outcome: Outcome, least: int) -> Verdict | None:
    """None if at least `least` bytes were sent: fewer can't have brought the right values."""
    sent = outcome.trace.sent_bytes()
    if sent >= least:
        return None
    return Verdict(False, f"{sent:,} B sent in all", f"≥ {least:,} B in all",
                   clue="The values are right, but fewer bytes were sent than it takes: they did "
                        "not come through comm, and only what does counts.")


def compare(name: str, got: Any, wanted: torch.Tensor, whose: str, clue: str) -> Verdict | None:
    """None if `got` is `wanted`, to the bit; else what is wrong with it."""
    if not isinstance(got, torch.Tensor):
        kind = "no dense tensor" if isinstance(got, Opaque) else type(got).__name__
        return Verdict(False, f"{name} is {kind}", "a tensor",
                       clue="Return the tensor that holds the result.")
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return Verdict(False, f"{name}: {got.dtype} {tuple(got.shape)}",
                       f"{wanted.dtype} {tuple(wanted.shape)}",
                       clue="The result has the wrong shape or dtype.")
    different = (got != wanted).nonzero().tolist()
    if not different:
        return None
    at = tuple(different[0])
    place = f"{name}[{', '.join(map(str, at))}]" if at else name
    return Verdict(False, f"{place} = {got[at].item():g}", f"{wanted[at].item():g}, {whose}",
                   clue=clue)


def rounds(case: Case, outcome: Outcome, allowed: int, formula: str, clue: str) -> Verdict:
    """One second a message, and infinite bandwidth: the virtual time counts the rounds."""
    took = outcome.elapsed_s
    text = f"{took:g} / {allowed}"
    passed = took <= allowed + 1e-9
    return Verdict(passed, counted(took, "round"), f"≤ {formula} = {counted(allowed, 'round')}",
                   rounds=text, clue="" if passed else clue)


# ---- what runs cost -----------------------------------------------------------------------------


Judge = Callable[[Case, Outcome], Verdict]
Clue = str | Callable[[list[int]], str]  # or of the bytes by rank
COLLECTIVES: dict[str, Any] = {  # of a case in which the library's collectives may be called
    "library": True, "latency_s": 1e-6, "bandwidth_Bps": 1e9}
NO_SUCH_PIECE = {"tuple index out of range": (
    "There are fewer pieces than the index asks for. x.tensor_split(k) makes k pieces of any x, "
    "0 to k − 1; x.split(m) makes pieces of m elements, x.chunk(k) may make fewer than k; and an "
    "index that goes round needs % k.")}
ONLY_SIMULATED = "It works in the simulator, but not on real processes over Gloo."


def sent_at_most(case: Case, outcome: Outcome, allowed: int, bound: str, clue: Clue) -> Verdict:
    """Does no rank send more than `allowed` bytes? clue: why it may be more, of what ranks sent."""
    sent = [outcome.trace.sent_bytes(rank) for rank in range(case.ranks)]
    most = max(sent)
    return Verdict(most <= allowed, f"rank {sent.index(most)} sent {most:,} B",
                   f"≤ {bound} = {allowed:,} B", f"{most:,} / {allowed:,}",
                   clue=clue if isinstance(clue, str) else clue(sent))


def held_at_most(outcome: Outcome, allowed: int, what: str, clue: Clue) -> Verdict:
    """Does no rank hold more than `allowed` bytes beside x? clue: why it may, of what ranks hold.
    """
    held = outcome.peak_bytes
    return Verdict(max(held) <= allowed, f"{max(held):,} B beside x", f"≤ {allowed:,} B{what}",
                   clue=clue if isinstance(clue, str) else clue(held))


def real(case: Case, judge: Judge, provided: Judge | None = None) -> Check:
    """The same on real processes."""
    return Check("real", 1, f"{case.ranks} processes over Gloo", [case], judge, ONLY_SIMULATED,
                 provided=provided)


def broadcast_case(ranks: int, n: int, root: int, *more: Any, dtype: torch.dtype = F32,
                   seed: int = 0, said: str = "", **options: Any) -> Case:
    """The function is given x of n elements, the root, and `more`."""
    args = [(numbers((n,), dtype, 1000 * seed + 10 * ranks + rank), root, *more)
            for rank in range(ranks)]
    facts = {"n": n, "nbytes": n * dtype.itemsize, "root": root, "wanted": args[root][0].clone()}
    text = f"{describe_case(ranks, n, dtype)}, root {root}{said}"
    return Case(text, args, facts=facts, **options)


def judge_broadcast(case: Case, outcome: Outcome, clue: Callable[[Case, Outcome, int], str]
                    ) -> Verdict:
    """Has every rank the root's x, in its own, come in messages? clue(…, rank): the mistake that
    its x shows, if it isn't one of any broadcast."""
    root, wanted = case.facts["root"], case.facts["wanted"]
    for rank, (x, *_) in enumerate(outcome.after):
        wrong = compare(f"rank {rank}: x", x, wanted, f"as rank {root} has it", "")
        if wrong is None:
            continue
        value = outcome.values[rank]
        if rank == root:
            return wrong._replace(clue="The root's own x was overwritten: the root only sends.")
        if isinstance(value, torch.Tensor) and torch.equal(value, wanted):
            return wrong._replace(clue="The returned tensor is right, but x is not: receive into x "
                                       "itself.")
        return wrong._replace(clue=clue(case, outcome, rank))
    right = Verdict(True, "the root's x, on every rank", "the root's x, on every rank")
    return not_sent(outcome, (case.ranks - 1) * case.facts["nbytes"]) or right
