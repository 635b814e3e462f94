"""The judge: grades a submission by the checks of an exercise.

It runs in a process of its own, forked from the fork server, so that nothing the learner's notebook
has patched (torch.equal, time, dtlab itself) reaches it. This does not stop a determined attacker,
as submissions run under the same user: grade strangers in a container.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from typing import Any

import torch

from dtlab.errors import DtlabError, RankDied, RankFailed
from dtlab.grading.case import Case, CaseFailure, Outcome, Submission
from dtlab.grading.exercise import Check, find_exercise, grade_check, not_tried, skipped, verdict_of
from dtlab.grading.report import Report, Row
from dtlab.grading.sandbox import CASE_LIMIT_S, Sandbox
from dtlab.processes import run

TOTAL_LIMIT_S = 15.0  # of real time, for all cases of an exercise; a right answer takes one
GLOO_LIMIT_S = 10.0


def grade_submission(submission: Submission, exercise_id: str, seed: int = 0) -> Report:
    """Grade in a fresh process, then run the checks that need real processes over Gloo."""
    began = time.monotonic()
    exercise = find_exercise(exercise_id)
    checks = exercise.build(seed)
    try:
        result = run(_judge, submission, exercise_id, seed, ranks=1, timeout=3 * TOTAL_LIMIT_S,
                     trace=False, echo=False)
    except DtlabError as error:  # the submission left its sandbox and ended the judge
        why = f"the judge's process ended: {str(error).splitlines()[0]}"
        return Report(exercise.id, exercise.title, [not_tried(check, why) for check in checks],
                      details=str(error))
    report = Report.from_dict(result.values[0])
    rows = {row.name: row for row in report.rows}
    for check in checks:
        if _is_real(check):
            rows[check.name] = _real_row(check, submission, report)
    report.rows = [rows[check.name] for check in checks]
    report.seconds = time.monotonic() - began
    return report


def _is_real(check: Check) -> bool:
    return any(case.gloo for case in check.cases)


# ---- in the judge's own process ----------------------------------------------------------------


def _judge(_comm: Any, submission: Submission, exercise_id: str, seed: int) -> dict[str, Any]:
    """Run all simulated cases, then judge. Returns the report as a dictionary."""
    prepare_to_fork()
    exercise = find_exercise(exercise_id)
    checks = [check for check in exercise.build(seed) if not _is_real(check)]
    outcomes = _run_cases(checks, submission)
    report = Report(exercise.id, exercise.title)
    for check in checks:
        report.rows.append(grade_check(check, outcomes, report.rows))
    wrong = next((row for row in report.rows if not row.passed), None)
    if wrong is not None:
        check = checks[report.rows.index(wrong)]
        bad = next(c for c in check.cases if not verdict_of(check, c, outcomes[c]).passed)
        report.details, report.printed = _evidence(outcomes[bad])
    return report.to_dict()


def prepare_to_fork() -> None:
    """Before forking: no threads of torch, and no process group that a fork would inherit dead."""
    torch.set_num_threads(1)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _run_cases(checks: list[Check], submission: Submission) -> dict[Case, Outcome]:
    """The outcome of each case. Once one does not end, or when the first check's cases give no
    result at all, the rest is not tried."""
    outcomes: dict[Case, Outcome] = {}
    until_s = time.monotonic() + TOTAL_LIMIT_S
    sandbox = Sandbox(submission)
    stop = ""
    try:
        for check in checks:
            for case in check.cases:
                if case not in outcomes:
                    outcomes[case] = skipped(stop) if stop else sandbox.run_case(case)
                    stop = stop or _reason_to_stop(outcomes[case], until_s)
            if not stop and all(outcomes[case].failure for case in checks[0].cases):
                stop = f"get “{checks[0].name}” right first"
    finally:
        sandbox.close()
    return outcomes


def _reason_to_stop(outcome: Outcome, until_s: float) -> str:
    if outcome.failure and outcome.failure.kind == "hung":
        return f"an earlier case had not ended after {CASE_LIMIT_S} s"
    if time.monotonic() > until_s:
        return f"the cases before took more than {TOTAL_LIMIT_S:g} s"
    return ""


def _evidence(outcome: Outcome) -> tuple[str, str]:
    """What helps to find the mistake: a traceback or the waiting table; and what was printed."""
    failure = outcome.failure
    rank = max(failure.rank, 0) if failure else 0
    printed = outcome.printed[rank] if rank < len(outcome.printed) else ""
    if failure is None or failure.error == "NotImplementedError":
        return "", printed
    return failure.details, printed


# ---- on real processes -------------------------------------------------------------------------


def _real_row(check: Check, submission: Submission, report: Report) -> Row:
    """Try a check's cases on real processes, unless the exercise's first check has failed."""
    first = report.rows[0]
    if not first.passed:
        return not_tried(check, f"counts once “{first.name}” is right")
    outcomes = {case: _run_on_gloo(case, submission) for case in check.cases}
    row = grade_check(check, outcomes, report.rows)
    if not row.passed and not report.details:
        report.details, _ = _evidence(next(iter(outcomes.values())))
    return row


def _run_on_gloo(case: Case, submission: Submission) -> Outcome:
    try:
        result = run(_call, submission, case.args, case.harness, ranks=case.ranks,
                     timeout=GLOO_LIMIT_S, echo=False)
    except RankFailed as error:
        cause = type(error.__cause__).__name__ if error.__cause__ else "error"
        return Outcome(failure=CaseFailure("raised", error.rank, cause, str(error).split("\n")[0],
                                       details=error.traceback_text))
    except RankDied as error:
        return Outcome(failure=CaseFailure("died", error.rank, message=str(error)))
    except DtlabError as error:
        headline, _, table = str(error).partition("\n")
        return Outcome(failure=CaseFailure("hung", message=headline, details=table))
    values, after = zip(*result.values, strict=True)
    return Outcome(list(values), list(after), result.elapsed_s, result.trace,
                   [0] * case.ranks, result.output)


def _call(comm: Any, submission: Submission, args: list[tuple[Any, ...]],
          harness: Callable[..., Any] | None) -> tuple[Any, Any]:
    """On a rank: open the submission, call it; returns its value and its arguments afterwards."""
    import sys

    os.chdir(submission.cwd)
    sys.path[:] = submission.path
    given = args[comm.rank]
    function = pickle.loads(submission.pickled)
    value = harness(function, comm, *given) if harness else function(comm, *given)
    return value, given
