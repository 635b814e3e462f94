"""The verdict on an outcome, also if there is no result, or one of a kind that no judge expects."""

from __future__ import annotations

import re

import torch
from torch.utils._pytree import tree_leaves

from dtlab.grading.case import Case, CaseFailure, Outcome
from dtlab.grading.clues import collective_in
from dtlab.grading.exercise import Judge, Verdict

_KINDS = {
    "deadlock": "deadlock",
    "hung": "still running",
    "pending": "not waited for",
    "died": "process died",
    "limit": "never stopped",
    "skipped": "not tried",
}

MOST_NUMBERS = 10_000  # in a tensor; a judge that expects a list could loop over more for minutes


def verdict_of(judge: Judge, case: Case, outcome: Outcome) -> Verdict:
    """Return the verdict of `judge`; a case without a result fails whatever is judged."""
    if outcome.failure is not None:
        return _of_failure(case, outcome.failure)
    if name := collective_in(case, outcome):
        return Verdict(False, f"the answer calls {name}", "messages of your own", evidence=name)
    try:
        if case.wanted is None and any(isinstance(x, torch.Tensor) and x.numel() > MOST_NUMBERS
                                       for x in tree_leaves(outcome.values)):
            raise ValueError
        verdict = judge(case, outcome)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError):
        # The function may have returned anything, also what the judge does not expect.
        actual = f"returned {outcome.values!r:.100}"
        return Verdict(False, actual, "what the task asks for", evidence=actual)
    return verdict if verdict.evidence is not None else verdict._replace(
        evidence=_without_numbers(verdict.actual))


def _of_failure(case: Case, failure: CaseFailure) -> Verdict:
    where = f" on rank {failure.rank}" if failure.rank >= 0 and case.ranks > 1 else ""
    if failure.kind == "raised":
        message = failure.message.removeprefix(f"rank {failure.rank}: ")
        actual = f"{failure.error}{where}: {message}".rstrip(": ")
    else:
        actual = f"{_KINDS[failure.kind]}{where}: {failure.message}"
    at = f" ({failure.at})" if failure.at else ""
    doing = [line.split()[:2] for line in failure.details.splitlines()[1:]
             ] if failure.kind == "deadlock" else []
    text = " ".join((actual + at).split())
    # Sizes and ranks tell one mismatch from another; other numbers may be addresses in memory.
    told = failure.message if failure.error == "ShapeMismatch" else _without_numbers(
        failure.message)
    return Verdict(False, text if len(text) <= 220 else text[:219] + "…", "a result", evidence=(
        failure.kind, failure.error, told, doing))


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "#", text)
