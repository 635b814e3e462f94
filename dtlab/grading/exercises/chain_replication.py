"""Chapter 09: a chain that loses no add, judged by what a client sees when nodes die at every
possible moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import cloudpickle

from dtlab.grading.case import Case, Outcome, counted
from dtlab.grading.draws import varied
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._chain_run import BASE, ChainMessage, ChainRun, Crash, Receive, copied
from dtlab.grading.standard import always

# (receive, nodes, …) → its results. It runs in the learner's process with the learner's function
# `receive`, and again in the judge's, where `receive` returns the recorded answers.
Experiment = Callable[..., Iterable[Any]]
ROLES = {"head": 0, "middle": 1, "tail": 2}


# ---- experiments -------------------------------------------------------------------------------


def run_all(receive: Receive, nodes: int, schedules: Sequence[int],
            victims: Sequence[tuple[int, ...]] = ((),), stride: int = 1, again: bool = False
            ) -> Iterator[ChainRun]:
    """Yield a run for every moment (or one of `stride`) at which the victims could die, up to a run
    whose messages have no end. victims: sets of nodes that die in one run. again: the client sends
    every add twice."""
    for schedule in schedules:
        for who in victims:
            for crashes in _moments(receive, nodes, schedule, who, stride):
                run = ChainRun(receive, nodes, schedule, crashes, again).run()
                yield run
                if run.flood:
                    return


def _moments(receive: Receive, nodes: int, schedule: int, victims: tuple[int, ...], stride: int
             ) -> Iterator[list[Crash]]:
    """Yield lists of one crash for each victim: all combinations of moments."""
    if not victims:
        yield []
        return
    for crashes in _moments(receive, nodes, schedule, victims[:-1], stride):
        run = ChainRun(receive, nodes, schedule, crashes).run()
        points = [] if run.flood else run.points(victims[-1])[::stride]
        yield from ([*crashes, point] for point in points) if points else [crashes]


def count_messages(receive: Receive, nodes: int, schedule: int) -> list[int]:
    """Return three counts: the messages that nodes send for one add, when nothing else is under
    way; the messages that they send when node 1 dies afterwards; and the requests that stay
    unanswered if node 1 dies at its first message."""
    run = ChainRun(receive, nodes, schedule)
    counts = []
    for happens in (run.settle, run.client.add, partial(run.kill, 1)):
        before = sum(map(sum, run.handled.values()))
        happens()
        run.settle()
        counts.append(sum(map(sum, run.handled.values())) - before)
    dead = ChainRun(receive, nodes, schedule, [Crash(1, 0, 0)]).run()
    return [*counts[1:], len(dead.client.open)]


# ---- in the learner's process ------------------------------------------------------------------


def record(experiment: Experiment, receive: Receive, *args: Any) -> list[Any]:
    """Return all that `receive` returns, call by call. Each node has a copy of the function, so
    that nodes share no variables."""
    answers: list[Any] = []
    fresh = cloudpickle.dumps(receive)
    own: dict[int, tuple[Any, Receive]] = {}  # holds the node, so that no other node gets its id

    def recorded(node: dict[str, Any], message: ChainMessage) -> Any:
        if id(node) not in own:
            own[id(node)] = node, cloudpickle.loads(fresh)
        sent = own[id(node)][1](node, message)
        answers.append(copied(sent))
        return sent

    for _ in experiment(recorded, *args):
        pass
    return answers


# ---- in the judge ------------------------------------------------------------------------------


def _replayed(case: Case, outcome: Outcome) -> list[Any]:
    """Run the experiment again, with the recorded answers, so that the records of client and
    network are out of the learner's reach; [] if the answers don't fit the messages. A node that
    answers the same messages in two ways, in one run and in another, is marked `knew`."""
    answers, first = iter(outcome.values[0]), dict[Any, Any]()

    def receive(node: dict[str, Any], message: ChainMessage) -> Any:
        before = node.get("seen", (node["me"], *node["chain"]))
        seen = node["seen"] = hash((before, repr(message)))
        sent = next(answers)
        node["knew"] = node.get("knew") or first.setdefault(seen, sent) != sent
        return sent

    try:
        return list(case.facts["experiment"](receive, *case.args[0]))
    except Exception:
        return []


def _problem(run: ChainRun) -> str:
    """Return the first problem of one run; "" if there is none."""
    client = run.client
    if run.flood:
        return "messages without end"
    if client.guessed:
        return "a node answered with an add of which no message told it"
    if any(state.get("knew") for state in run.states.values()):
        return "a node answered the same messages in two ways: it knows more than they tell"
    for value, certain, sent in client.reads:
        if value is None:
            return "a read was answered with something that is not a number"
        counts = {place: value // BASE**place % BASE for place in range(len(client.adds))}
        if value != sum(counts[place] * BASE**place for place in sent):
            return f"a read returned {value}, which no adds make"
        if twice := [place for place in sent if counts[place] > 1]:
            return f"add {twice[0]} counts {counts[twice[0]]} times"
        if lost := [place for place in certain if not counts[place]]:
            return f"add {lost[0]}, acknowledged or seen before, is not in a later read"
    for request in client.open.values():
        return "a read was never answered" if request[0] == "read" else "an add was never answered"
    return ""


def _judge(case: Case, outcome: Outcome) -> Verdict:
    runs: list[ChainRun] = _replayed(case, outcome)
    wanted = "each add once, none lost"
    for run in runs:
        if problem := _problem(run):
            when = "; ".join(f"node {node} died in its event {event}, "
                             f"{counted(messages, 'message')} sent"
                             for node, event, messages in run.crashes.values())
            return Verdict(False, f"{problem}, after {when}" if when else problem, wanted,
                           evidence=problem)
    if not runs:
        return Verdict(False, "no messages", wanted)
    tried = counted(len(runs), "crash point" if runs[0].crashes else "run")
    return Verdict(True, f"{tried}: none lost, none twice", wanted)


def _messages(case: Case, outcome: Outcome) -> Verdict:
    each, after, _ = _replayed(case, outcome)
    nodes = case.args[0][0]
    most = 2 * nodes - 1  # t − 1 down, t − 1 up, 1 to the client
    if each <= most and after > nodes:
        return Verdict(False, f"{after} messages when a node died, though all was acknowledged",
                       f"≤ {nodes}")
    return Verdict(each <= most, f"{each} messages per add", f"≤ {most} messages per add",
                   evidence=each)


def _answers(case: Case, outcome: Outcome) -> Verdict:
    """Are there messages, and are those that a dead node has lost sent again?"""
    counts = _replayed(case, outcome)
    if len(counts) < 3 or not counts[0]:
        return Verdict(False, "no messages", "an answer to each request")
    return Verdict(not counts[2], f"{counted(counts[2], 'request')} unanswered, after node 1 died",
                   "an answer to each request")


def _build(seed: int) -> list[Check]:
    def case(text: str, function: Experiment, *args: Any, nodes: int = 3, **more: Any) -> Case:
        experiment = partial(function, **more)
        return Case(text, [(nodes, *args)], comm=False, harness=partial(record, experiment),
                    facts={"experiment": experiment})

    first = varied(seed, 10**9)
    schedules = list(range(first, first + 6))
    no_crash = [case(f"{counted(n, 'node')}, no crash", run_all, schedules, nodes=n)
                for n in range(1, 5)]
    again = [case(f"{counted(n, 'node')}, each add sent twice", run_all, schedules, nodes=n,
                  again=True) for n in (1, 3, 4)]
    dies = {role: [case(f"3 nodes, the {role} dies", run_all, [schedule], victims=[(node,)])
                   for schedule in schedules]
            for role, node in ROLES.items()}
    pairs = [case(f"{n} nodes, two die", run_all, [schedule], nodes=n, stride=stride,
                  victims=list(permutations(range(n), 2)))
             for n, schedule, stride in zip((3, 3, 3, 4), schedules, (7, 6, 5, 13), strict=False)]
    return [
        Check("no crash", 1, "1, 2, 3, 4 nodes", no_crash, _judge),
        Check("asked again", 1, "the client sends each add twice", again, _judge),
        *(Check(f"{role} dies", points, f"3 nodes, every moment, {len(schedules)} schedules",
                dies[role], _judge, requires=always)
          for role, points in (("head", 1), ("middle", 4), ("tail", 1))),
        Check("two die", 1, "3 and 4 nodes, many pairs of moments", pairs, _judge, requires=always),
        Check("messages", 1, "3 and 5 nodes",
              [case(f"{n} nodes", count_messages, first, nodes=n) for n in (3, 5)], _messages,
              requires=_answers),
    ]


EXERCISE = Exercise("chain-replication", "Chain replication", "chain_node", _build)
