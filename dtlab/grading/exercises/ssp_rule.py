"""Chapter 08: the rule by which an SSP server answers or holds a request, in a server of ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from dtlab.comm import Comm
from dtlab.grading.case import Case, Outcome
from dtlab.grading.draws import generator, scale
from dtlab.grading.exercise import Check, Exercise, Judge, Verdict
from dtlab.grading.standard import always

STEPS = 6
SAME_S = 1e-3  # virtual times that differ by less are equal: messages take far less
Rule = Callable[[str, int, list[int], float], Any]  # request, clock, clocks, staleness
Query = tuple[str, int, list[int], float]
NO, YES = "stuck", "go on"


def _right(request: str, clock: int, clocks: list[int], staleness: float) -> bool:
    return request == "push" or clock - min(clocks) <= staleness


# ---- the rule alone ----------------------------------------------------------------------------


def ask(function: Rule, queries: Sequence[Query]) -> list[Any]:
    """In the sandbox, return the learner's answers."""
    return [function(request, clock, list(clocks), s) for request, clock, clocks, s in queries]


def _queries(staleness: float, seed: int) -> Case:
    """A case of pulls and pushes of every worker of several clusters, near the bound and far."""
    random = generator(seed, "queries", staleness)
    queries: list[Query] = []
    for workers in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13):
        most = 3 if staleness == math.inf else int(staleness) + 3
        clocks = (random.integers(0, 4) + random.integers(0, most + 1, workers)).tolist()
        queries += [(request, clock, clocks, staleness)
                    for clock in sorted(set(clocks)) for request in ("pull", "push")]
    return Case(f"{len(queries)} requests, s = {_shown(staleness)}", [(queries,)], comm=False,
                harness=ask)


def _answers(what: str) -> Judge:
    """Judge the answers to requests of this kind ("pull" or "push"). An answer that never holds a
    request fails for both kinds, though all pushes may be answered."""
    def judge(case: Case, outcome: Outcome) -> Verdict:
        queries, answers = case.args[0][0], outcome.values[0]
        for query, answer in zip(queries, answers, strict=True):
            request, clock, clocks, s = query
            asked = f"{request!r}, clock {clock}, clocks {clocks}, s = {_shown(s)}"
            if type(answer) not in (bool, int) or answer not in (0, 1):
                return Verdict(False, f"{asked}: {answer!r}"[:200], str(_right(*query)),
                               evidence="neither True nor False")
            if request == what and bool(answer) != _right(*query):
                return Verdict(False, f"{asked}: {bool(answer)}"[:200], str(_right(*query)),
                               evidence=[bool(each) for each in answers])
        if all(answers) and not all(_right(*query) for query in queries):
            return Verdict(False, "no request is ever held", "pulls are",
                           evidence="all are answered")
        return Verdict(True, "all as SSP has it", "True or False, as SSP has it")

    return judge


# ---- in a server -------------------------------------------------------------------------------


def cluster(function: Rule, comm: Comm, pace: Sequence[float], staleness: float) -> str:
    """In the sandbox, serve on rank 0 by the learner's rule; the others are workers, and pace holds
    a worker's seconds for each iteration."""
    if comm.rank == 0:
        return _serve(function, comm, staleness)
    for step, seconds in enumerate(pace):
        if _request(comm, "pull") == NO:
            return NO
        with comm.compute(str(step), seconds=seconds):
            pass
        if _request(comm, "push") == NO:
            return NO
        comm.send("clock", 0)
    comm.send("finish", 0)
    return YES


def _request(comm: Comm, what: str) -> str:
    comm.send(what, 0)
    return str(comm.recv_object(0))


def _serve(function: Rule, comm: Comm, staleness: float) -> str:
    """Hold each request until the rule allows an answer; if all are held, end the run."""
    clocks = dict.fromkeys(range(1, comm.size), 0)
    held: dict[int, str] = {}
    active = set(clocks)
    while active:
        message: list[Any] = []
        src = comm.recv(message)
        (what,) = message
        if what == "finish":
            active.remove(src)
        elif what == "clock":
            clocks[src] += 1
        else:
            held[src] = what
        for worker, request in list(held.items()):
            if function(request, clocks[worker], list(clocks.values()), staleness):
                del held[worker]
                comm.send(YES, worker)
        if active and active == set(held):
            for worker in held:
                comm.send(NO, worker)
            return NO
    return YES


def _run(name: str, paces: list[list[float]], staleness: float) -> Case:
    tried = f"{name}, {len(paces)} workers, s = {_shown(staleness)}"
    args: list[tuple[Any, ...]] = [([], staleness), *((pace, staleness) for pace in paces)]
    return Case(tried, args, latency_s=1e-7, harness=cluster, clock=True,
                facts={"paces": paces, "staleness": staleness})


def begins_s(paces: Sequence[Sequence[float]], staleness: float) -> list[list[float]]:
    """Return when each worker begins each iteration under SSP: iteration c begins once its worker
    is free, and the slowest worker has ended iteration c − s − 1."""
    begins: list[list[float]] = [[] for _ in paces]
    ends: list[list[float]] = [[] for _ in paces]
    for c, worker in product(range(len(paces[0])), range(len(paces))):
        free = ends[worker][-1] if c else 0.0
        last = c - staleness - 1
        slowest = max(ended[int(last)] for ended in ends) if last >= 0 else 0.0
        begins[worker].append(max(free, slowest))
        ends[worker].append(begins[worker][-1] + paces[worker][c])
    return begins


def begins(early: bool = True, late: bool = True) -> Judge:
    """Judge, by the referee's own trace, whether each worker begins each iteration when SSP lets
    it. early, late: whether to look for iterations that begin too early, or too late. If only for
    too early ones, a worker must begin its first iteration at least."""
    def judge(case: Case, outcome: Outcome) -> Verdict:
        s, promises = case.facts["staleness"], [
            "no worker more than s ahead"] * early + ["a worker s ahead or less goes on"] * late
        begun = {(span.rank, int(span.label)): span.start_s for span in outcome.trace.spans}
        wanted = {(worker, step): right_s
                  for worker, row in enumerate(begins_s(case.facts["paces"], s), 1)
                  for step, right_s in enumerate(row)}
        for (worker, step), right_s in sorted(wanted.items(), key=lambda item: item[1]):
            at_s, said = begun.get((worker, step)), f"worker {worker} began iteration {step}"
            if at_s is None:
                if late or not step:
                    return Verdict(False, said.replace("began", "never began"), promises[0])
            elif early and at_s < right_s - SAME_S:
                return Verdict(False, f"{said} at {at_s:.2f} s, {int(s) + 1} or more ahead of the "
                               f"slowest", f"not before {right_s:.2f} s, when the slowest has "
                               f"passed clock {step} − s")
            elif late and at_s > right_s + SAME_S:
                return Verdict(False, f"{said} at {at_s:.2f} s", f"at {right_s:.2f} s: no worker "
                               "was more than s clocks behind it then")
        return Verdict(True, "; ".join(promises), "; ".join(promises))

    return judge


def _shown(staleness: float) -> str:
    return "∞" if staleness == math.inf else str(int(staleness))


def _build(seed: int) -> list[Check]:
    def paces(workers: int) -> list[list[float]]:
        rows: list[list[float]] = generator(seed, workers).uniform(
            0.05, 1.0, (workers, STEPS)).tolist()
        return rows

    one_slow = [[pace * scale(seed, pace, most=1.1)] * STEPS for pace in (0.1, 0.4, 0.25)]
    runs = [_run("one slow worker", one_slow, s) for s in (1, 2, 3)]
    runs += [_run("random speeds", paces(workers), s) for workers, s in ((2, 2), (4, 1))]
    ends = [_run("random speeds", paces(3), s) for s in (0, math.inf)]
    asked = [_queries(s, seed) for s in (0, 1, 2, 5, math.inf)]
    return [
        Check("the rule", 2, "pulls, 1 to 13 workers, s = 0, 1, 2, 5, ∞", asked, _answers("pull")),
        Check("pushes", 1, "pushes, 1 to 13 workers", asked, _answers("push")),
        Check("never more than s ahead", 2, "2 to 4 workers, s = 1 to 3, simulated", runs,
              begins(late=False)),
        Check("s ahead is allowed", 2, "2 to 4 workers, s = 1 to 3, simulated", runs,
              begins(early=False), requires=always),
        Check("both ends", 1, "s = 0 is BSP, s = ∞ is ASP, simulated", ends, begins()),
    ]


EXERCISE = Exercise("ssp-rule", "The rule of SSP", "may_answer", _build)
