"""Judges answers that are the course's own, its solutions and mistakes, in the simulator of this
process: no sandbox, and a tenth of the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dtlab.comm import Comm
from dtlab.errors import ConfigError, Deadlock, DtlabError, UnwaitedWork
from dtlab.grading.case import Case, CaseFailure, Outcome
from dtlab.grading.exercise import Check, Exercise, find_exercise
from dtlab.grading.frames import Blob, decode, encode
from dtlab.grading.judge import (
    Trials,
    fingerprints_of,
    in_own_process,
    report_of,
    runs_on_gloo,
    try_all,
)
from dtlab.grading.learner_check import make_submission
from dtlab.grading.learner_errors import describe_error
from dtlab.grading.mistakes import Fingerprints, KnownMistake, Mistake, answer_of, mistakes_in
from dtlab.grading.rank_server import RankServer
from dtlab.grading.referee import INVALID, deadlock_failure
from dtlab.grading.report import Report
from dtlab.grading.sandbox import Sandbox, new_outcome
from dtlab.grading.standard import LARGE_N
from dtlab.ranks.unwritten import unwritten_is_nan
from dtlab.simulator import simulate


def try_trusted(checks: Sequence[Check], function: Callable[..., Any], server: RankServer
                ) -> Trials:
    """Try `function` in this process; in ranks of `server` if memory is measured, or over Gloo."""
    sandbox = Sandbox(make_submission(function, getattr(function, "__name__", "answer")), server)

    def run_case(case: Case) -> Outcome:
        return sandbox.run_case(case) if case.meter or case.gloo else run_here(function, case)

    try:
        return try_all(checks, run_case)
    finally:
        sandbox.close()


def run_here(function: Callable[..., Any], case: Case) -> Outcome:
    """Call the function on every rank of `case`, all in this process."""
    outcome = new_outcome(case)
    takes_comm, harness, oracle = case.comm, case.harness, case.oracle  # ranks get copies of them

    def rank_main(comm: Comm, calls: Sequence[tuple[Any, ...]]) -> tuple[Any, Any, int, Any]:
        given, asked = calls[comm.rank], list[Any]()
        args_after = tuple(copy(x) if isinstance(x, (list, dict)) else x for x in given)
        answers: Any = oracle(comm.rank) if oracle else None

        def ask(*args: Any) -> Any:
            asked.append(args)
            try:
                return _as_sent(answers(comm, *args))
            except INVALID as error:
                raise ConfigError(f"{type(error).__name__}: {error}") from None

        inputs = (*[comm] * takes_comm, *[ask] * (oracle is not None), *given)
        value = harness(function, *inputs) if harness else function(*inputs)
        notes = getattr(answers, "notes", None)
        return _as_sent(value), _as_sent(args_after), len(asked), notes

    try:
        with unwritten_is_nan():  # as in a rank's process
            result = simulate(rank_main, case.args, network=case.network, echo=False)
    except DtlabError as error:
        outcome.failure = _failure(error)
    else:
        values, after, asked, notes = zip(*result.values, strict=True)
        outcome.values, outcome.args_after, outcome.asked = [*values], [*after], [*asked]
        outcome.notes = [*notes]
        outcome.elapsed_s, outcome.trace = result.elapsed_s, result.trace
    return outcome


def _as_sent(value: Any) -> Any:
    """Return `value` as a rank's process would report it."""
    blobs: list[Blob] = []
    return decode(encode(value, blobs), blobs)


def _failure(error: DtlabError) -> CaseFailure:
    if isinstance(error, Deadlock):
        return deadlock_failure(error, error.waiting)
    rank, cause = getattr(error, "rank", -1), error.__cause__ or error
    if isinstance(error, UnwaitedWork):
        return CaseFailure("pending", rank, message=str(cause))
    said = describe_error(cause)
    return CaseFailure("raised", rank, said["error"], said["message"], said["at"],
                       said["traceback"])


class Judged(NamedTuple):
    """The reports on the solution and on each mistake, and the mistakes' fingerprints."""

    solution: Report
    mistakes: list[Report]
    known: list[KnownMistake]


def judge_mistakes(exercise_id: str, folder: Path) -> Judged:
    """Judge, in a process of its own, the exercise's solution and all its mistakes. The hints on
    each mistake come from the fingerprints of all of them."""
    judged: Judged = in_own_process(_judge_mistakes, exercise_id, folder)
    return judged


def _checks_of(exercise: Exercise, seed: int) -> list[Check]:
    """Return the checks without cases of `LARGE_N` elements, which find memory that a process hides
    from its meter: none of our mistakes hides any."""
    return [replace(check, cases=[case for case in check.cases if case.facts.get("n", 0) < LARGE_N])
            for check in exercise.build(seed)]


def _judge_mistakes(exercise_id: str, folder: Path) -> Judged:
    exercise = find_exercise(exercise_id)
    with RankServer("none", exercise.library) as server:
        checks = _checks_of(exercise, 0)
        solution = try_trusted(checks, answer_of(Mistake({}, ""), exercise, folder), server)
        tried = try_mistakes(exercise, 0, folder, server)
    known = [mistake for mistake, _ in tried]
    reports = [report_of(exercise, checks, trials, lambda: known)
               for trials in (solution, *(trials for _, trials in tried))]
    return Judged(reports[0], reports[1:], known)


def try_mistakes(exercise: Exercise, seed: int, folder: Path, server: RankServer
                 ) -> list[tuple[KnownMistake, Trials]]:
    """Run the exercise's mistakes, if they are in `folder`, on the inputs of this seed; return
    their fingerprints and trials. Only those that pass in the simulator run over Gloo, too."""
    checks, found = _checks_of(exercise, seed), []
    simulated = [check for check in checks if not runs_on_gloo(check)]
    for mistake in mistakes_in(exercise, folder):
        answer = answer_of(mistake, exercise, folder)
        trials = try_trusted(simulated, answer, server)
        if all(trial.verdict.passed for each in trials.values() for trial in each):
            trials = try_trusted(checks, answer, server)
        found.append((KnownMistake(mistake.hint, _fingerprints(checks, trials)), trials))
    return found


def _fingerprints(checks: Sequence[Check], trials: Trials) -> Fingerprints:
    """Return the fingerprints in the simulator: over Gloo, two runs may fail in different ways."""
    return {check.name: [found.get(number) for number in range(len(check.cases))]
            for check in checks if not runs_on_gloo(check)
            for found in [fingerprints_of(trials.get(check.name, []))]}
