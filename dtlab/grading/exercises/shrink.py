"""Chapter 15: survivors agree, by messages, on who is left; ranks die in the middle of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dtlab.comm import Comm, Send, Work
from dtlab.grading.case import Case, Outcome, counted
from dtlab.grading.draws import generator, varied
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.standard import MESSAGE_BYTES, always, sum_bytes, too_few

LIMIT_S, LATENCY_S = 1.0, 0.01
NEVER = 10**6  # more messages than any rank sends
SORTED = "Return a list of ranks, in order, each once."
SPARE = 3  # rounds that are allowed besides `deaths`; one of them is needed


class RankKilled(BaseException):
    """Ends a rank that is killed."""


class Alive:
    """The referee's side of a rank, which asks before each message that it sends whether it is
    still alive. So a rank can't know in advance when it dies."""

    def __init__(self, dies: Mapping[int, int], rank: int):
        self._remaining = dies.get(rank, NEVER)

    def __call__(self, _comm: Comm) -> bool:
        self._remaining -= 1
        return self._remaining >= 0


def run_rank(function: Callable[..., Any], comm: Comm, alive: Callable[[], bool], deaths: int,
             begins: bool, late_s: float) -> Any:
    """In the sandbox, run one rank. Returns [its answer], or None if it has died. begins: False if
    it was dead before."""
    post_one, works = comm.post, list[Work]()

    def post(*ops: Any) -> list[Work]:
        first = len(works)
        for op in ops:
            if isinstance(op, Send) and not alive():
                for work in works:
                    work.cancel()
                raise RankKilled
            works.extend(post_one(op))
        return works[first:]

    comm.post = post  # type: ignore[method-assign]
    with comm.compute("busy", late_s):
        pass
    try:
        return [function(comm, deaths, LIMIT_S)] if begins else None
    except RankKilled:
        return None


def _judge(case: Case, outcome: Outcome) -> Verdict:
    dies: Mapping[int, int] = case.facts["dies"]
    living = [r for r, value in enumerate(outcome.values) if value is not None or r not in dies]
    wanted = f"{living} on each of them"
    answers = {rank: (outcome.values[rank] or [None])[0] for rank in living}
    evidence = list(answers.values())
    for rank, actual in answers.items():
        if outcome.trace.messages(rank) > min(outcome.asked[rank], max(dies.get(rank, NEVER), 0)):
            return Verdict(False, f"rank {rank} sent more than it lived to send", wanted)
        if outcome.asked[rank] > (most := (case.facts["deaths"] + SPARE) * (case.ranks - 1)):
            return Verdict(False, f"rank {rank} sent {outcome.asked[rank]} messages", f"≤ {most}",
                           evidence=outcome.asked, clue="A rank sends at most (deaths + 3)·(p − 1) "
                           "messages: in each round, one to each other rank.")
        if (not isinstance(actual, list) or not all(type(r) is int for r in actual)
                or actual != sorted(set(actual))):
            return Verdict(False, f"rank {rank} returned {actual!r:.60}",
                           "a list of ranks, in order", evidence=evidence,
                           clue=SORTED)
        if missing := sorted(set(living) - set(actual)):
            return Verdict(False, f"rank {rank} leaves out rank {missing[0]}, which lives", wanted,
                           evidence=evidence)
        if dead := [r for r in actual if dies.get(r, NEVER) < 0 or not 0 <= r < case.ranks]:
            return Verdict(False, f"rank {rank} counts rank {dead[0]}, dead from the beginning",
                           wanted, evidence=evidence)
        if actual != answers[living[0]]:
            return Verdict(False, f"rank {living[0]} returned {answers[living[0]]}, rank {rank} "
                           f"{actual}", "the same list", evidence=evidence)
    least = sum_bytes(len(living), MESSAGE_BYTES)  # each rank must hear of every other
    return too_few(outcome, least) or Verdict(True, "the same list", wanted)


def _time(case: Case, outcome: Outcome) -> Verdict:
    most = (case.facts["deaths"] + 1.3) * LIMIT_S
    return Verdict(outcome.elapsed_s <= most, f"{outcome.elapsed_s:.2f} s", f"≤ {most:.2f} s",
                   evidence=round(outcome.elapsed_s, 1))


def _case(seed: int, ranks: int, dies: Mapping[int, int], late: Sequence[int] = ()) -> Case:
    """A case in which ranks die. dies: rank → the number of messages that it sends before; -1: it
    is dead from the beginning. late: ranks that begin a quarter of the limit later. Seeds other
    than 0 renumber the ranks."""
    names = generator(seed, ranks, dies, late).permutation(ranks) if seed else range(ranks)
    dies, late = {int(names[r]): n for r, n in dies.items()}, [names[r] for r in late]
    deaths = sum(sends >= 0 for sends in dies.values())
    said = ", ".join(f"rank {rank} dead" if sends < 0 else
                     f"rank {rank} dies after {counted(sends, 'message')}"
                     for rank, sends in dies.items())
    args = [(deaths, dies.get(rank, 0) >= 0, LIMIT_S / 4 * (rank in late))
            for rank in range(ranks)]
    return Case(f"{counted(ranks, 'rank')}{', ' * bool(said)}{said}", args, harness=run_rank,
                oracle=partial(Alive, dies), clock=True, latency_s=LATENCY_S,
                facts={"dies": dies, "deaths": deaths})


def _build(seed: int) -> list[Check]:
    case = partial(_case, seed)
    no_death = [case(p, {}) for p in (1, 2, 3 + varied(seed, 4))] + [case(4, {}, late=[1, 2])]
    dead_before = [case(4, {1: -1}), case(5, {0: -1, 3: -1}), case(5, {1: -1, 2: -1}, [4]),
                   case(3, {0: -1, 2: -1})]
    # Some ranks die late, so that an answer can't get past all deaths by first sending messages
    # without meaning.
    one = [case(4, {rank: sends}) for rank in (0, 1, 3) for sends in (0, 1, 2, 3, 5, 7, 9, 11)]
    one += [case(4, {2: -1, rank: sends}) for rank in (0, 3) for sends in (1, 2)]
    two = [case(5, dies) for dies in (
        {4: 1, 0: 5}, {0: 1, 4: 5}, {0: 1, 1: 5}, {3: 2, 1: 6}, {0: 0, 1: 1}, {2: 3, 4: 7},
        {0: 2, 1: 10}, {3: 5, 2: 13}, {4: 4, 0: 16}, {1: 3, 3: 19})]
    two += [case(5, {1: -1, 4: 1, 0: 5}), case(5, {2: 2, 0: 1}, late=[1, 3])]
    return [
        Check("all live", 1, "1 to 5 ranks", no_death, _judge),
        Check("dead before", 2, "3 to 5 ranks, one or two dead", dead_before, _judge,
              requires=always),
        Check("one dies", 2, "4 ranks, after any number of messages", one, _judge, requires=always),
        Check("two die", 2, "5 ranks", two, _judge, requires=always),
        Check("time", 1, "deaths + 1 limits", [*dead_before, *one, *two], _time, requires=_judge),
    ]


EXERCISE = Exercise("shrink", "Shrink", "survivors", _build)
