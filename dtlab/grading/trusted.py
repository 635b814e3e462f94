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
from dtlab.grading.judge import Trials, in_own_process, is_real, prints_of, report_of, try_all
from dtlab.grading.learner_check import seal
from dtlab.grading.learner_errors import describe_error
from dtlab.grading.mistakes import Mistake, Prints, Traces, answer_of, mistakes_in
from dtlab.grading.rank_server import RankServer
from dtlab.grading.referee import INVALID, deadlocked
from dtlab.grading.report import Report
from dtlab.grading.sandbox import Sandbox, new_outcome
from dtlab.grading.standard import VAST
from dtlab.ranks.unwritten import unwritten_is_nan
from dtlab.simulator import simulate


def try_trusted(checks: Sequence[Check], function: Callable[..., Any], server: RankServer
                ) -> Trials:
    """Try `function`. If memory is measured, or processes are real, `server` starts the ranks."""
    sandbox = Sandbox(seal(function, getattr(function, "__name__", "answer")), server)

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
        kept = tuple(copy(x) if isinstance(x, (list, dict)) else x for x in given)
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
        return _as_sent(value), _as_sent(kept), len(asked), notes

    try:
        with unwritten_is_nan():  # as in a rank's process
            result = simulate(rank_main, case.args, network=case.network, echo=False)
    except DtlabError as error:
        outcome.failure = _failure(error)
    else:
        values, after, asked, notes = zip(*result.values, strict=True)
        outcome.values, outcome.after, outcome.asked = [*values], [*after], [*asked]
        outcome.notes = [*notes]
        outcome.elapsed_s, outcome.trace = result.elapsed_s, result.trace
    return outcome


def _as_sent(value: Any) -> Any:
    """Return `value` as a rank's process would report it."""
    blobs: list[Blob] = []
    return decode(encode(value, blobs), blobs)


def _failure(error: DtlabError) -> CaseFailure:
    if isinstance(error, Deadlock):
        return deadlocked(error, error.waiting)
    rank, cause = getattr(error, "rank", -1), error.__cause__ or error
    if isinstance(error, UnwaitedWork):
        return CaseFailure("pending", rank, message=str(cause))
    said = describe_error(cause)
    return CaseFailure("raised", rank, said["error"], said["message"], said["at"],
                       said["traceback"])


# ---- all mistakes of an exercise ----------------------------------------------------------------


class Judged(NamedTuple):
    """The reports on the solution and on each mistake, and what the mistakes leave behind."""

    solution: Report
    mistakes: list[Report]
    traces: list[Traces]


def judge_mistakes(exercise_id: str, folder: Path) -> Judged:
    """Judge, in a process of its own, the exercise's solution and all its mistakes, each by what
    all of them leave behind."""
    told: Judged = in_own_process(_judge_mistakes, exercise_id, folder)
    return told


def _checks_of(exercise: Exercise, seed: int) -> list[Check]:
    """Return the checks without cases that show what a process hides: none of our mistakes does."""
    return [replace(check, cases=[case for case in check.cases if case.facts.get("n", 0) < VAST])
            for check in exercise.build(seed)]


def _judge_mistakes(exercise_id: str, folder: Path) -> Judged:
    exercise = find_exercise(exercise_id)
    with RankServer("none", exercise.library) as server:
        checks = _checks_of(exercise, 0)
        solution = try_trusted(checks, answer_of(Mistake({}, ""), exercise, folder), server)
        traced = try_mistakes(exercise, 0, folder, server)
    traces = [trace for trace, _ in traced]
    reports = [report_of(exercise, checks, trials, lambda: traces)
               for trials in (solution, *(trials for _, trials in traced))]
    return Judged(reports[0], reports[1:], traces)


def try_mistakes(exercise: Exercise, seed: int, folder: Path, server: RankServer
                 ) -> list[tuple[Traces, Trials]]:
    """Run the exercise's mistakes, if they are in `folder`, and return what they leave behind with
    this seed. Only those that pass in the simulator run on real processes, too."""
    checks, found = _checks_of(exercise, seed), []
    simulated = [check for check in checks if not is_real(check)]
    for mistake in mistakes_in(exercise, folder):
        answer = answer_of(mistake, exercise, folder)
        trials = try_trusted(simulated, answer, server)
        if all(trial.verdict.passed for each in trials.values() for trial in each):
            trials = try_trusted(checks, answer, server)
        found.append((Traces(mistake.hint, _prints(checks, trials)), trials))
    return found


def _prints(checks: Sequence[Check], trials: Trials) -> Prints:
    """Fingerprint what runs in the simulator: real processes need not fail twice alike."""
    return {check.name: [found.get(number) for number in range(len(check.cases))]
            for check in checks if not is_real(check)
            for found in [prints_of(trials.get(check.name, []))]}
