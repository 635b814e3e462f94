"""The judge: grades a submission by the checks of an exercise.

It runs in a process of its own, forked from the fork server, so that nothing the learner's notebook
has patched (torch.equal, time, dtlab itself) reaches it; the submission runs in others, which a
`RankServer` forks.
"""

from __future__ import annotations

import time

import torch

from dtlab.grading.case import Case, Outcome, Submission
from dtlab.grading.exercise import (
    Check,
    find_exercise,
    grade_check,
    not_tried,
    skipped,
    verdict_of,
)
from dtlab.grading.rank_server import RankServer, ServerEnded
from dtlab.grading.report import Report, Row
from dtlab.grading.sandbox import CASE_LIMIT_S, Sandbox

TOTAL_LIMIT_S = 60.0  # of real time, for all cases of an exercise; a right answer takes one


def grade_answer(server: RankServer, submission: Submission, exercise_id: str, seed: int) -> Report:
    """Run all cases of the exercise on processes of `server`, then judge."""
    began = time.monotonic()
    exercise = find_exercise(exercise_id)
    checks = exercise.build(seed)
    simulated = [check for check in checks if not _is_real(check)]
    report = Report(exercise.id, exercise.title)
    sandbox = Sandbox(submission, server)
    outcomes: dict[Case, Outcome] = {}
    try:
        _run_cases(sandbox, simulated, outcomes)
        before: set[Case] = set()  # in which values count by themselves
        for check in simulated:
            report.rows.append(grade_check(check, outcomes, report.rows, before))
            if check.provided is None:
                before.update(check.cases)
        for check in checks:
            if _is_real(check):
                report.rows.append(_real_row(check, sandbox, outcomes, report))
        sandbox.close()
    except ServerEnded as error:
        rows = [not_tried(check, str(error)) for check in checks]
        return Report(exercise.id, exercise.title, rows)
    order = [check.name for check in checks]
    report.rows.sort(key=lambda row: order.index(row.name))
    report.details, report.printed = _evidence(checks, outcomes, report)
    report.seconds = time.monotonic() - began
    return report


def prepare_to_fork() -> None:
    """Before forking: no threads of torch, and no process group that a fork would inherit dead."""
    torch.set_num_threads(1)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _is_real(check: Check) -> bool:
    return any(case.gloo for case in check.cases)


def _run_cases(sandbox: Sandbox, checks: list[Check], outcomes: dict[Case, Outcome]) -> None:
    """Note the outcome of each case. Once one does not end, or when the first check's cases give no
    result at all, the rest is not tried."""
    until_s = time.monotonic() + TOTAL_LIMIT_S
    stop = ""
    for check in checks:
        for case in check.cases:
            if case not in outcomes:
                outcomes[case] = skipped(stop) if stop else sandbox.run_case(case)
                stop = stop or _reason_to_stop(outcomes[case], until_s)
        if not stop and all(outcomes[case].failure for case in checks[0].cases):
            stop = f"get “{checks[0].name}” right first"


def _reason_to_stop(outcome: Outcome, until_s: float) -> str:
    if outcome.failure and outcome.failure.kind == "hung":
        return f"an earlier case had not ended after {CASE_LIMIT_S} s"
    if time.monotonic() > until_s:
        return f"the cases before took more than {TOTAL_LIMIT_S:g} s"
    return ""


def _real_row(check: Check, sandbox: Sandbox, outcomes: dict[Case, Outcome],
              report: Report) -> Row:
    """Try a check's cases on real processes, unless the exercise's first check has failed."""
    first = report.rows[0]
    if not first.passed:
        return not_tried(check, f"counts once “{first.name}” is right")
    for case in check.cases:
        outcomes[case] = sandbox.run_case(case)
    return grade_check(check, outcomes, report.rows)


def _evidence(checks: list[Check], outcomes: dict[Case, Outcome],
              report: Report) -> tuple[str, str]:
    """What helps to find the first mistake: a traceback or the waiting table; what was printed."""
    for check, row in zip(checks, report.rows, strict=True):
        for case in check.cases if row.looked_at and not row.passed else ():
            outcome = outcomes[case]
            if not verdict_of(check, case, outcome).passed:
                return _evidence_of(outcome)
    return "", ""


def _evidence_of(outcome: Outcome) -> tuple[str, str]:
    failure = outcome.failure
    rank = max(failure.rank, 0) if failure else 0
    printed = outcome.printed[rank] if rank < len(outcome.printed) else ""
    if failure is None or failure.error == "NotImplementedError":
        return "", printed
    return failure.details, printed
