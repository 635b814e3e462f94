"""Cases and judges that many exercises share: of values, bytes, rounds, memory, real processes. An
exercise itself defines its oracle and its bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dtlab.grading.case import ANY, Case, Outcome, Wanted, counted, describe_case
from dtlab.grading.compare import difference
from dtlab.grading.draws import numbers, widest
from dtlab.grading.exercise import FAR_MORE, Check, Judge, Verdict
from dtlab.trace import Trace

F32, F64, BF16, I64 = torch.float32, torch.float64, torch.bfloat16, torch.int64
MESSAGE_BYTES = 8  # a smaller message counts as this many bytes
SCALAR_BYTES = 256  # allowed beside a memory bound: single numbers, printed or compared
COLLECTIVES: dict[str, Any] = {  # options of a case in which answers may call collectives
    "library": True, "latency_s": 1e-6, "bandwidth_Bps": 1e9}

Bound = Callable[[Case], float]


def lg_ceil(p: int) -> int:
    """⌈lg p⌉."""
    return (p - 1).bit_length()


def bytes_sent(outcome: Outcome, rank: int | None = None) -> int:
    """The bytes sent by one rank (None: by all), each message counted as in `padded`."""
    return padded(outcome).sent_bytes(rank)


def padded(outcome: Outcome) -> Trace:
    """The trace with messages of at least `MESSAGE_BYTES`: an empty message carries information,
    too, by its arrival."""
    messages = [m._replace(nbytes=max(m.nbytes, MESSAGE_BYTES)) for m in outcome.trace.transfers]
    return Trace(outcome.trace.ranks, messages)


def ring_bytes(p: int, n: int, item: int = 8) -> int:
    """Return the most bytes that a rank sends in a ring all-reduce of n elements: 2(p−1) chunks."""
    return 2 * (p - 1) * max(-(-n // p) * item, MESSAGE_BYTES)


def sum_bytes(p: int, nbytes: int, givers: int | None = None) -> int:
    """The fewest bytes that p ranks send in all until each has the sum of the vectors of `givers`
    of them (default: of all): a reduce to one rank, and a broadcast."""
    return ((p if givers is None else givers) - 1 + p - 1) * nbytes


# ---- values -------------------------------------------------------------------------------------


def items(*names: str) -> Judge:
    """Judge whether these items of what every rank returns (no names: all), and its arguments
    afterwards, are as the case wants them, and can have come in messages."""
    def judge(case: Case, outcome: Outcome) -> Verdict:
        wanted = case.wanted
        assert wanted is not None
        judged = [part for rank in range(case.ranks) for part in _parts(case, outcome, rank, names)]
        wrong = next((d for part in judged if (d := difference(*part, wanted.rtol))), None)
        if wrong:
            evidence = [actual for _, actual, right in judged if right is not ANY]
            return Verdict(False, wrong[0], f"{wrong[1]}, {wanted.what}", evidence=evidence)
        return too_few(outcome, wanted.least_bytes) or Verdict(
            True, f"right{' on every rank' * (case.ranks > 1)}", wanted.what)

    return judge


values = items()


def both(first: Judge, second: Judge) -> Judge:
    """Judge by `first`, and if that passes by `second`."""
    def judge(case: Case, outcome: Outcome) -> Verdict:
        verdict = first(case, outcome)
        return second(case, outcome) if verdict.passed else verdict

    return judge


def always(case: Case, outcome: Outcome) -> Verdict:
    """Pass. As `requires`, it lets a check count only once the exercise's first check passes."""
    return Verdict(True, "", "")


def too_few(outcome: Outcome, least_bytes: int) -> Verdict | None:
    """Return a failed verdict if all ranks together have sent fewer bytes, so that the result can't
    have come in messages; else None."""
    sent = bytes_sent(outcome)
    return None if sent >= least_bytes else Verdict(
        False, f"{sent:,} B sent in all", f"≥ {least_bytes:,} B in all", evidence="too few bytes")


def _parts(case: Case, outcome: Outcome, rank: int, names: Sequence[str]
           ) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, actual, wanted) of each part of the rank's result. names: as in `items`."""
    wanted, where = case.wanted, f"rank {rank}: " if case.ranks > 1 else ""
    assert wanted is not None
    actual = outcome.values[rank]
    if wanted.returns is not None and wanted.items and isinstance(actual, (tuple, list)) and (
            len(actual) == len(wanted.items)):
        for name, *pair in zip(wanted.items, actual, wanted.returns[rank], strict=True):
            if not names or name in names:
                yield f"{where}{name}", *pair
    elif wanted.returns is not None:
        yield where.removesuffix(": ") or "result", actual, wanted.returns[rank]
    if wanted.args_after is not None:
        for name, *pair in zip(wanted.names, outcome.args_after[rank], wanted.args_after[rank],
                               strict=False):
            yield f"{where}{name}", *pair


def on_gloo(cases: Case | Sequence[Case], judge: Judge = values, requires: Judge | None = None
            ) -> Check:
    """Return a check of cases that run on real processes."""
    cases = [cases] if isinstance(cases, Case) else cases
    return Check("real", 1, f"{cases[0].ranks} processes over Gloo", cases, judge, requires)


LARGE_N = 1 << 24  # elements: 64 MB of float32, against which processes hardly differ in size


def grows_at_most(bound: Bound, what: str, spare: int = 4) -> Judge:
    """Judge the values and, if x has `LARGE_N` elements, the growth of the processes: none may
    exceed `bound(case)` bytes and the `spare`-th part of x. The memory of threads, mappings and
    libraries counts, too."""
    def judge(case: Case, outcome: Outcome) -> Verdict:
        verdict, x_bytes = values(case, outcome), case.facts["nbytes"]
        most, allowed = max(outcome.grown_bytes), bound(case) + x_bytes // spare
        if not verdict.passed or case.facts["n"] < LARGE_N or most <= allowed:
            return verdict
        return Verdict(False, FAR_MORE, f"{what} beside x")

    return judge


def memory(tried: str, bound: Bound, what: str, cases: Sequence[Case], processes: Sequence[Case]
           ) -> tuple[Check, Check]:
    """Return two checks that no rank holds more than `bound(case)` bytes: by its own meter in
    `cases`, and, with a margin, by the operating system in `processes`, some with `LARGE_N`
    elements."""
    return (Check("memory", 1, tried, cases, held_at_most(bound, f": {what}"), values,
                  metered=True),
            on_gloo(processes, grows_at_most(bound, what)))


# ---- what runs cost -----------------------------------------------------------------------------


def sent_at_most(bound: Bound, formula: str) -> Judge:
    """Does no rank send more than `bound(case)` bytes?"""
    def judge(case: Case, outcome: Outcome) -> Verdict:
        sent = [bytes_sent(outcome, rank) for rank in range(case.ranks)]
        most, allowed = max(sent), int(bound(case))
        return Verdict(most <= allowed, f"rank {sent.index(most)} sent {most:,} B",
                       f"≤ {formula} = {allowed:,} B", f"{most:,} / {allowed:,}", evidence=sent)

    return judge


def one_mean(length: Callable[[Case], int], formula: str) -> Judge:
    """Judge whether each rank sends at most the bytes of one ring all-reduce of `length(case)`
    numbers, and of another of one number, the count of samples."""
    def bound(case: Case) -> int:
        return ring_bytes(case.ranks, length(case) + 1) + ring_bytes(case.ranks, 1)

    def judge(case: Case, outcome: Outcome) -> Verdict:
        sent = Counter(m.src for m in outcome.trace.transfers)
        most, allowed = max(sent.values(), default=0), 4 * (case.ranks - 1)
        if most > allowed:
            return Verdict(False, f"a rank sent {counted(most, 'message')}", f"≤ {allowed}: "
                           "an all-reduce, and one of a number", evidence=sorted(sent.values()))
        return sent_at_most(bound, formula)(case, outcome)

    return judge


def rounds_at_most(bound: Bound, formula: str) -> Judge:
    """Does it take at most `bound(case)` rounds, each a second, with infinite bandwidth?"""
    def judge(case: Case, outcome: Outcome) -> Verdict:
        took, allowed = outcome.elapsed_s, int(bound(case))
        return Verdict(took <= allowed + 1e-9, counted(took, "round"),
                       f"≤ {formula} = {counted(allowed, 'round')}",
                       rounds=f"{took:g} / {allowed}", evidence=took)

    return judge


def held_at_most(bound: Bound, what: str = "") -> Judge:
    """Does no rank hold more than `bound(case)` bytes beside what it was given?"""
    def judge(case: Case, outcome: Outcome) -> Verdict:
        most, allowed = max(outcome.peak_bytes), int(bound(case))
        return Verdict(most <= allowed + SCALAR_BYTES, f"{most:,} B beside x",
                       f"≤ {allowed:,} B{what}", evidence=round(most / max(allowed, 1), 1))

    return judge


# ---- broadcast, all-reduce ----------------------------------------------------------------------


def repeated(key: tuple[Any, ...], n: int, dtype: torch.dtype, most: int) -> torch.Tensor:
    """Draw n whole numbers. For seed 0, `LARGE_N` numbers repeat a part, which takes less time."""
    parts = 256 if n == LARGE_N and not key[0] else 1
    return numbers(key, (n // parts,), dtype, most).repeat(parts)


def broadcast_case(ranks: int, n: int, root: int, *more: Any, dtype: torch.dtype = F32,
                   seed: int = 0, said: str = "", **options: Any) -> Case:
    """The function is given x of n elements, the root, and `more`; it leaves the root's x."""
    args = [(repeated((seed, ranks, n, root, dtype, rank), n, dtype, widest(seed, dtype, 99)), root,
             *more) for rank in range(ranks)]
    nbytes = n * dtype.itemsize
    wanted = Wanted(args_after=[(args[root][0].clone(),)] * ranks, what=f"as rank {root} has it",
                    least_bytes=(ranks - 1) * nbytes)
    return Case(f"{describe_case(ranks, n, dtype)}, root {root}{said}", args, wanted=wanted,
                facts={"n": n, "nbytes": nbytes, "root": root}, **options)


def any_dtype(case: Callable[[torch.dtype], Case], judge: Judge = values) -> Check:
    """Return a check with a case of each of several dtypes."""
    return Check("any dtype", 1, "float64, bfloat16, complex, integers", [
        case(dtype) for dtype in (F64, I64, torch.int32, BF16, torch.complex64)], judge)


def summing_case(ranks: int, n: int, dtype: torch.dtype, seed: int, *more: Any, said: str = "",
                 **options: Any) -> Case:
    """The function is given x of n elements, and `more`; it leaves the sum of all ranks' x."""
    args = [(repeated((seed, ranks, n, dtype, *more, rank), n, dtype, widest(seed, dtype)), *more)
            for rank in range(ranks)]
    total = torch.stack([x for x, *_ in args]).sum(0).to(dtype)  # exact in every dtype
    item = dtype.itemsize
    wanted = Wanted(args_after=[(total,)] * ranks, what="the sum",
                    least_bytes=sum_bytes(ranks, n * item))
    return Case(describe_case(ranks, n, dtype) + said, args, wanted=wanted,
                facts={"n": n, "item": item, "nbytes": n * item}, **options)
