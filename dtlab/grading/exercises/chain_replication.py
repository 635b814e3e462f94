"""Chapter 09: a chain that loses nothing, judged by what a client sees when nodes die at every
moment at which they could."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._chain_game import ADDS, Crash, Flood, Game, points

Receive = Callable[[dict[str, Any], tuple[Any, ...]], Any]
Facts = dict[str, Any]
ROLES = {"head": 0, "middle": 1, "tail": 2}


# ---- in the learner's process ------------------------------------------------------------------


def play_calm(receive: Receive, nodes: int, schedules: list[int], again: bool) -> list[Facts]:
    """Games in which nobody dies; `again`: the client sends every add twice."""
    return [_facts(Game(receive, nodes, schedule, again=again), ()) for schedule in schedules]


def play_crashes(receive: Receive, nodes: int, victim: int, schedules: list[int]) -> list[Facts]:
    """A game for every moment at which `victim` could die."""
    found = []
    for schedule in schedules:
        for crash in points(_played(Game(receive, nodes, schedule)), victim):
            found.append(_facts(Game(receive, nodes, schedule, [crash]), [crash]))
    return found


def play_pairs(receive: Receive, nodes: int, schedule: int, stride: int) -> list[Facts]:
    """Two nodes die: one in `stride` of all pairs of moments."""
    return [_facts(Game(receive, nodes, schedule, pair), pair)
            for pair in _pairs(receive, nodes, schedule, stride)]


def play_letters(receive: Receive, nodes: int) -> list[int]:
    """Letters that the nodes send for one add, when all before are over; and when, in the calm
    after it, the node next to the head dies."""
    game = Game(receive, nodes, 0)
    counts = []
    for happens in (game.settle, game.client.add, partial(game.kill, 1)):
        before = sum(map(sum, game.handled.values()))
        happens()
        game.settle()
        counts.append(sum(map(sum, game.handled.values())) - before)
    return counts[1:]


def _played(game: Game) -> Game:
    try:
        return game.play()
    except Flood:
        return game


def _facts(game: Game, crashes: Any) -> Facts:
    try:
        found = game.play().facts()
    except Flood:
        found = {"flood": True}
    return found | {"crashes": [tuple(crash) for crash in crashes]}


def _pairs(receive: Receive, nodes: int, schedule: int, stride: int) -> Iterator[list[Crash]]:
    count = 0
    calm = _played(Game(receive, nodes, schedule))
    for first in range(nodes):
        for crash in points(calm, first):
            count += 1
            if count % stride:
                continue
            one = _played(Game(receive, nodes, schedule, [crash]))
            for second in range(nodes):
                if second != first:
                    yield from ([crash, other] for other in points(one, second)[::stride])


# ---- in the court ------------------------------------------------------------------------------

_CLUES = {
    "flood": "The letters never end: does a node answer a letter that needs no answer, or send one "
             "to itself?",
    "no number": "(\"value\", number, value): the value is node[\"values\"].get(key, 0), a whole "
                 "number.",
    "twice": "An add was carried out twice. The same letter may come again, from the client or from "
             "the node before: remember the numbers that you have had, and pass on without adding.",
    "lost": "What was acknowledged is gone, so it was acknowledged too early, or forgotten too "
            "early. Only the tail may answer the client: what it has, all have. And each node keeps "
            "what it has passed on until the tail's word comes back; when the chain changes, it "
            "sends all of that to its new successor.",
    "stale": "A read doesn't see what was acknowledged before it was asked: the tail, which answers "
             "reads, must be the last to have an add, and the one that acknowledges it.",
    "stuck": "What was on its way to the dead node is gone, and nobody sends it again. Each node "
             "keeps what it has passed on until the tail's word comes back; when the chain "
             "changes, it sends all of that to its new successor.",
    "unanswered": "The client waits for an answer that never comes. The tail answers every add, "
                  "also one that it has had already: the answer to the first may have got lost "
                  "with the node that gave it. Who is the tail now?",
}


def _problem(facts: Facts, nodes: int) -> tuple[str, str]:
    """The first thing that is wrong with one game: its kind, and in words. Or two empty texts."""
    if facts.get("flood"):
        return "flood", "letters without end"
    for value, certain, sent in facts["reads"]:
        if value is None:
            return "no number", "a read was answered with something that is no number"
        for place in range(ADDS):
            count = value // 4**place % 4
            if count > 1 and sent >> place & 1:
                return "twice", f"add {place} counts {count} times"
            if count == 0 and certain >> place & 1:
                kind = "lost" if facts["crashes"] else "stale"
                return kind, f"add {place}, acknowledged or seen before, is not in a later read"
            if count and not sent >> place & 1:
                return "no number", f"a read returned {value}, which no adds make"
    if facts["unanswered"]:
        inner = any(0 < crash[0] < nodes - 1 for crash in facts["crashes"])
        return "stuck" if inner else "unanswered", f"add {facts['unanswered'][0]} was never answered"
    if facts["silent reads"]:
        return "unanswered", "a read was never answered"
    return "", ""


def _judge(case: Case, outcome: Outcome) -> Verdict:
    games: list[Facts] = outcome.values[0]
    for facts in games:
        kind, words = _problem(facts, case.facts["nodes"])
        if kind:
            when = "; ".join(_crash_text(crash, case) for crash in facts["crashes"])
            return Verdict(False, words + (f", after {when}" if when else ""),
                           "each add once, none lost", clue=_CLUES[kind])
    many = f"{len(games)} crash points" if games and games[0]["crashes"] else f"{len(games)} games"
    return Verdict(True, f"{many}: none lost, none twice", "each add once, none lost")


def _crash_text(crash: tuple[int, int, int], case: Case) -> str:
    node, event, letters = crash
    sent = f"{letters} letter{'s' * (letters != 1)} sent"
    return f"node {node} died in its event {event}, {sent}"


def _letters(case: Case, outcome: Outcome) -> Verdict:
    each, after = outcome.values[0]
    nodes = case.facts["nodes"]
    most = 2 * nodes - 1  # t − 1 down, t − 1 up, 1 to the client
    came, wanted = f"{each} letters an add", f"≤ {most} letters an add on {nodes} nodes"
    if each > most:
        return Verdict(False, came, wanted, rounds=f"{each} / {most}",
                       clue="An add costs one letter down each link, one back up, and the answer.")
    if after > nodes:
        return Verdict(False, f"{after} letters when a node died, though all was acknowledged",
                       f"≤ {nodes}",
                       clue="A node may forget an add once the tail has it: let the tail's "
                            "acknowledgement travel back up the chain, node by node.")
    return Verdict(True, came, wanted, rounds=f"{each} / {most}")


def _build(seed: int) -> list[Check]:
    def case(text: str, harness: Callable[..., Any], *args: Any, nodes: int = 3) -> Case:
        return Case(text, [(nodes, *args)], comm=False, harness=harness, facts={"nodes": nodes})

    schedules = [100 * seed + number for number in range(6)]
    calm = [case(f"{n} nodes, no crash", play_calm, schedules, False, nodes=n) for n in range(1, 5)]
    again = [case(f"{n} nodes, each add sent twice", play_calm, schedules, True, nodes=n)
             for n in (1, 3, 4)]
    dies = {role: [case(f"3 nodes, the {role} dies", play_crashes, node, [schedule])
                   for schedule in schedules]
            for role, node in ROLES.items()}
    pairs = [case("3 nodes, two die", play_pairs, schedule, 7 - number)
             for number, schedule in enumerate(schedules[:3])]
    pairs.append(case("4 nodes, two die", play_pairs, schedules[3], 13, nodes=4))
    return [
        Check("no crash", 1, "1, 2, 3, 4 nodes", calm, _judge),
        Check("asked again", 1, "the client sends each add twice", again, _judge),
        *(Check(f"{role} dies", 2, f"3 nodes, every moment, {len(schedules)} schedules",
                dies[role], _judge) for role in ROLES),
        Check("two die", 1, "3 and 4 nodes, many pairs of moments", pairs, _judge),
        Check("letters", 1, "3 and 5 nodes", [case(f"{n} nodes", play_letters, nodes=n)
                                              for n in (3, 5)], _letters, provided=_answers),
    ]


def _answers(case: Case, outcome: Outcome) -> Verdict:
    """Does it send letters at all?"""
    return Verdict(outcome.values[0][0] > 0, "", "")


EXERCISE = Exercise("chain-replication", "Chain replication", "09", 1, "chain_node", _build)
