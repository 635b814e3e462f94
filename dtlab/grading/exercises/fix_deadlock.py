"""Chapter 00: a cycle in which all ranks send first is a deadlock. Fix it."""

from __future__ import annotations

from dtlab.grading.case import Case, Outcome, describe_case
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._standard import not_sent


def _case(ranks: int, seed: int, hint: str = "") -> Case:
    values = [100 * (seed + 1) + 7 * rank for rank in range(ranks)]
    return Case(describe_case(ranks), [(value,) for value in values], hint=hint)


def _judge(case: Case, outcome: Outcome) -> Verdict:
    sent = [args[0] for args in case.args]
    for rank, value in enumerate(outcome.values):
        wanted = sent[(rank - 1) % case.ranks]
        if value != wanted:
            return Verdict(False, f"rank {rank} returned {value!r}"[:80],
                           f"{wanted}, from its left", clue=_clue(outcome.values, rank, sent))
    right = Verdict(True, "no deadlock, right values", "the value of the left neighbour")
    return not_sent(outcome, case.ranks if case.ranks > 1 else 0) or right


def _clue(values: list[object], rank: int, sent: list[int]) -> str:
    value = values[rank]
    if value is None:
        return "The function returns nothing: add `return` with what was received."
    if isinstance(value, list):
        return "Return the value itself, not the list it was received into: inbox[0]."
    if values == sent:
        return "Each rank returned its own value: return what came from the left neighbour."
    if values == sent[1:] + sent[:1]:
        return "The values went round the wrong way: send to rank + 1, receive from rank − 1."
    if value in sent:
        whose = "its own value" if value == sent[rank] else f"that of rank {sent.index(value)}"
        return (f"Rank {rank} returned {whose}. Each rank sends its own value to its right, not "
                "what it has received, and returns what comes from its left.")
    return ""


def _build(seed: int) -> list[Check]:
    def check(name: str, ranks: list[int], hint: str = "") -> Check:
        tried = ", ".join(map(str, ranks)) + (" ranks" if ranks != [1] else " rank")
        return Check(name, 1, tried, [_case(p, seed, hint) for p in ranks], _judge)

    return [
        check("a pair", [2]),
        check("even circles", [4, 6, 8]),
        check("odd circles", [3, 5, 7, 9], "In an odd circle two neighbours have the same parity: "
              "try your order of sends and receives on paper for 3 ranks."),
        check("alone", [1], "A rank can't send to itself: if comm.size is 1, there is nothing to "
              "send, and its left neighbour's value is its own."),
    ]


EXERCISE = Exercise("fix-deadlock", "Mend the deadlock", "00", 2, "pass_right", _build)
