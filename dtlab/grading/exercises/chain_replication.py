"""Chapter 09: a chain that loses nothing, judged by what a client sees when nodes die at every
possible moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._chain_run import (
    ADDS,
    ChainMessage,
    ChainRun,
    Crash,
    Flood,
    Receive,
    copied,
    points,
)

Facts = dict[str, Any]
Experiment = Callable[..., list[Any]]  # (receive, nodes, …): calls receive, gives what came of it
ROLES = {"head": 0, "middle": 1, "tail": 2}


# ---- experiments: in the learner's process with its function, then in the judge with its answers


def run_calm(receive: Receive, nodes: int, schedules: list[int], again: bool) -> list[Facts]:
    """Runs in which no node dies; `again`: the client sends every add twice."""
    return [_facts(ChainRun(receive, nodes, schedule, again=again), ()) for schedule in schedules]


def run_crashes(receive: Receive, nodes: int, victim: int, schedules: list[int]) -> list[Facts]:
    """A run for every moment at which `victim` could die."""
    found = []
    for schedule in schedules:
        for crash in points(ChainRun(receive, nodes, schedule).run(), victim):
            found.append(_facts(ChainRun(receive, nodes, schedule, [crash]), [crash]))
    return found


def run_pairs(receive: Receive, nodes: int, schedule: int, stride: int) -> list[Facts]:
    """Two nodes die: one in `stride` of all pairs of moments."""
    return [_facts(ChainRun(receive, nodes, schedule, pair), pair)
            for pair in _pairs(receive, nodes, schedule, stride)]


def count_messages(receive: Receive, nodes: int) -> list[int]:
    """How many messages the nodes send for one add, after all earlier ones have ended; how many
    when the node next to the head dies after that; how many adds stay unanswered if it dies at
    once."""
    run = ChainRun(receive, nodes, 0)
    counts = []
    for happens in (run.settle, run.client.add, partial(run.kill, 1)):
        before = sum(map(sum, run.handled.values()))
        happens()
        run.settle()
        counts.append(sum(map(sum, run.handled.values())) - before)
    crashed = _facts(ChainRun(receive, nodes, 0, [Crash(1, 0, 0)]), ())
    return [*counts[1:], len(crashed.get("unanswered", "?"))]


def _facts(run: ChainRun, crashes: Any) -> Facts:
    crashes = [tuple(crash) for crash in crashes]
    try:
        return run.run().facts() | {"crashes": crashes}
    except Flood:
        raise Flood(crashes) from None


def _pairs(receive: Receive, nodes: int, schedule: int, stride: int) -> Iterator[list[Crash]]:
    count = 0
    calm = ChainRun(receive, nodes, schedule).run()
    for first in range(nodes):
        for crash in points(calm, first):
            count += 1
            if count % stride:
                continue
            one = ChainRun(receive, nodes, schedule, [crash]).run()
            for second in range(nodes):
                if second != first:
                    yield from ([crash, other] for other in points(one, second)[::stride])


# ---- in the learner's process ------------------------------------------------------------------


def record(experiment: Experiment, receive: Receive, *args: Any) -> list[Any]:
    """What `receive` returned, call after call, until messages have no end."""
    answers: list[Any] = []

    def recorded(node: dict[str, Any], message: ChainMessage) -> Any:
        sent = receive(node, message)
        answers.append([*map(copied, sent)] if type(sent) is list else copied(sent))
        return sent

    with suppress(Flood):
        experiment(recorded, *args)
    return answers


# ---- in the judge ------------------------------------------------------------------------------

_CLUES = {
    "flood": "The messages never end: does a node answer a message that needs no answer, or send "
             "one to itself?",
    "no number": "(\"value\", number, value): the value is node[\"values\"].get(key, 0), a whole "
                 "number.",
    "guessed": "A node knows only what its own messages have brought: what another node has in its "
               "memory is out of reach.",
    "twice": "An add was carried out twice. The same message may come again, from the client or "
             "from the node before: remember the numbers of adds that you have carried out, and "
             "pass these on without adding.",
    "lost": "An acknowledged add is lost, so it was acknowledged too early, or forgotten too "
            "early. Only the tail may answer the client: what it has, all nodes have. And each "
            "node keeps what it has passed on until the tail's acknowledgement comes back; when "
            "the chain changes, it sends all of that to its new successor.",
    "stale": "A read doesn't see an add that was acknowledged before the read was sent: the tail, "
             "which answers reads, must be the last to have an add, and the one that acknowledges "
             "it.",
    "stuck": "Messages on their way to the dead node are lost, and no node sends them again. Each "
             "node keeps what it has passed on until the tail's acknowledgement comes back; when "
             "the chain changes, it sends all of that to its new successor.",
    "unanswered": "The client waits for an answer that never comes. The tail answers every add, "
                  "also one that it has had already: the first answer may have been lost with the "
                  "node that sent it. Which node is the tail now?",
}


def _replayed(case: Case, outcome: Outcome) -> list[Any]:
    """What comes of the learner's answers. The client and the network keep their books here, where
    no answer reaches them; [] if these can't be the answers to their messages."""
    answers = iter(outcome.values[0])
    try:
        return list(case.facts["experiment"](lambda *_: next(answers), *case.args[0]))
    except Flood as flood:
        return [{"flood": True, "crashes": flood.args[0] if flood.args else []}]
    except Exception:
        return []


def _problem(facts: Facts, nodes: int) -> tuple[str, str]:
    """The first thing that is wrong with one run: its kind, and in words. Or two empty texts."""
    if facts.get("flood"):
        return "flood", "messages without end"
    if facts["guessed"]:
        return "guessed", "a node answered with an add of which no message told it"
    for value, certain, sent in facts["reads"]:
        if value is None:
            return "no number", "a read was answered with something that is not a number"
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
        return ("stuck" if inner else "unanswered",
                f"add {facts['unanswered'][0]} was never answered")
    if facts["silent reads"]:
        return "unanswered", "a read was never answered"
    return "", ""


def _judge(case: Case, outcome: Outcome) -> Verdict:
    runs: list[Facts] = _replayed(case, outcome)
    for facts in runs:
        kind, words = _problem(facts, case.facts["nodes"])
        if kind:
            when = "; ".join(_crash_text(crash, case) for crash in facts["crashes"])
            return Verdict(False, words + (f", after {when}" if when else ""),
                           "each add once, none lost", clue=_CLUES[kind])
    if not runs:
        return Verdict(False, "no messages", "each add once, none lost")
    tried = f"{len(runs)} crash points" if runs[0]["crashes"] else f"{len(runs)} runs"
    return Verdict(True, f"{tried}: none lost, none twice", "each add once, none lost")


def _crash_text(crash: tuple[int, int, int], case: Case) -> str:
    node, event, messages = crash
    sent = f"{messages} message{'s' * (messages != 1)} sent"
    return f"node {node} died in its event {event}, {sent}"


def _messages(case: Case, outcome: Outcome) -> Verdict:
    each, after, _ = _replayed(case, outcome)
    nodes = case.facts["nodes"]
    most = 2 * nodes - 1  # t − 1 down, t − 1 up, 1 to the client
    if each <= most and after > nodes:
        return Verdict(False, f"{after} messages when a node died, though all was acknowledged",
                       f"≤ {nodes}",
                       clue="A node may forget an add once the tail has it: let the tail's "
                            "acknowledgement travel back up the chain, node by node.")
    return Verdict(each <= most, f"{each} messages per add", f"≤ {most} messages per add",
                   shows=each,
                   clue="An add costs one message down each link, one back up, and the answer.")


def _build(seed: int) -> list[Check]:
    def case(text: str, experiment: Experiment, *args: Any, nodes: int = 3) -> Case:
        return Case(text, [(nodes, *args)], comm=False, harness=partial(record, experiment),
                    facts={"nodes": nodes, "experiment": experiment})

    schedules = [100 * seed + number for number in range(6)]
    calm = [case(f"{n} node{'s' * (n > 1)}, no crash", run_calm, schedules, False, nodes=n)
            for n in range(1, 5)]
    again = [case(f"{n} node{'s' * (n > 1)}, each add sent twice", run_calm, schedules, True,
                  nodes=n) for n in (1, 3, 4)]
    dies = {role: [case(f"3 nodes, the {role} dies", run_crashes, node, [schedule])
                   for schedule in schedules]
            for role, node in ROLES.items()}
    pairs = [case("3 nodes, two die", run_pairs, schedule, 7 - number)
             for number, schedule in enumerate(schedules[:3])]
    pairs.append(case("4 nodes, two die", run_pairs, schedules[3], 13, nodes=4))
    return [
        Check("no crash", 1, "1, 2, 3, 4 nodes", calm, _judge),
        Check("asked again", 1, "the client sends each add twice", again, _judge),
        *(Check(f"{role} dies", points, f"3 nodes, every moment, {len(schedules)} schedules",
                dies[role], _judge, provided=_any) for role, points in
          (("head", 1), ("middle", 4), ("tail", 1))),
        Check("two die", 1, "3 and 4 nodes, many pairs of moments", pairs, _judge, provided=_any),
        Check("messages", 1, "3 and 5 nodes", [case(f"{n} nodes", count_messages, nodes=n)
                                              for n in (3, 5)], _messages, provided=_answers),
    ]


def _answers(case: Case, outcome: Outcome) -> Verdict:
    """Does it send any messages, and again what a dead node has lost?"""
    counts = _replayed(case, outcome)
    return Verdict(len(counts) == 3 and counts[0] > 0 and not counts[2], "", "")


def _any(case: Case, outcome: Outcome) -> Verdict:
    """Crashes count, all of them, once the chain works without them."""
    return Verdict(True, "", "")


EXERCISE = Exercise("chain-replication", "Chain replication", "chain_node", _build)
