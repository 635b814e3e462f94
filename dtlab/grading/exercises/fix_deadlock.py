"""Chapter 00: a cycle in which all ranks send first is a deadlock. Fix it."""

from __future__ import annotations

from typing import Any

from dtlab.grading.case import Case, Wanted, describe_case
from dtlab.grading.draws import varied
from dtlab.grading.exercise import Check, Exercise, Judge
from dtlab.grading.standard import MESSAGE_BYTES, always, values


def _build(seed: int) -> list[Check]:
    def check(name: str, sizes: list[int], requires: Judge | None = None) -> Check:
        cases = []
        for p in sizes:
            given: list[Any] = []
            for rank in range(p):
                number = 100 + 7 * rank + varied(seed, 10**9, p, rank)
                given.append((number, f"number {number}", [number, None])[rank % 3])
            cases.append(Case(describe_case(p), [(value,) for value in given], wanted=Wanted(
                [given[rank - 1] for rank in range(p)], what="from its left",
                least_bytes=p * MESSAGE_BYTES * (p > 1))))
        tried = ", ".join(map(str, sizes)) + (" ranks" if sizes != [1] else " rank")
        return Check(name, 1, tried, cases, values, requires)

    return [
        check("a pair", [2]),
        check("even circles", [4, 6, 8]),
        check("odd circles", [3, 5, 7, 9]),
        check("alone", [1], requires=always),
    ]


EXERCISE = Exercise("fix-deadlock", "Mend the deadlock", "pass_right", _build)
