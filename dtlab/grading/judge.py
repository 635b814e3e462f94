"""The judge: grades an answer by the checks of an exercise.

`grade_answer` runs in a process of its own, forked from the fork server, so that nothing that the
learner's notebook has patched (torch.equal, time, dtlab itself) reaches it. The submission runs in
other processes, which a `RankServer` forks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dtlab.grading import clues
from dtlab.grading.case import Case, CaseFailure, Outcome, Submission
from dtlab.grading.compare import Fingerprint, fingerprint
from dtlab.grading.exercise import FAR_MORE, Check, Exercise, Verdict
from dtlab.grading.mistakes import KnownMistake, alike, hint_of, recorded
from dtlab.grading.rank_server import RankServer, ServerEnded
from dtlab.grading.referee import CASE_LIMIT_S
from dtlab.grading.report import Report, Row
from dtlab.grading.sandbox import Sandbox
from dtlab.grading.verdicts import verdict_of
from dtlab.processes.run import launch

LIMIT_S = 3600.0  # of the judge's process: a last resort, as each case has its own limit
TOTAL_LIMIT_S = 60.0  # of real time, for all cases of an exercise; a right answer takes two

RunCase = Callable[[Case], Outcome]
KnownMistakes = Callable[[], Sequence[KnownMistake]]


class Trial(NamedTuple):
    """A case of a check, and the check's verdict on its outcome, whose values are dropped."""

    number: int  # of the case, among the check's cases
    case: Case
    outcome: Outcome
    verdict: Verdict
    fingerprint: Fingerprint | None  # of the verdict's evidence; None: it passed
    clue: str = ""  # only of a check's first case that fails


Trials = Mapping[str, list[Trial]]  # check → its trials; a check that was not tried has no entry


def grade_answer(server: RankServer, submission: Submission, exercise: Exercise, seed: int,
                 known: KnownMistakes | None = None, until_s: float = math.inf) -> Report:
    """Run all cases of the exercise on processes of `server`, then judge. known: the fingerprints
    of mistakes with this seed; default: those that are recorded, of seed 0. until_s: when the time
    of the hand-in is over (monotonic)."""
    began = time.monotonic()
    checks, sandbox = exercise.build(seed), Sandbox(submission, server)
    if known is None:
        def known() -> Sequence[KnownMistake]:
            return recorded(exercise.id).mistakes if seed == 0 else ()
    try:
        report = report_of(exercise, checks, try_all(checks, sandbox.run_case, until_s), known)
        sandbox.close()
    except ServerEnded as error:
        rows = [not_tried(check, str(error)) for check in checks]
        return Report(exercise.id, exercise.title, rows)
    report.seconds = time.monotonic() - began
    return report


def in_own_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)` in a process that shares nothing with the caller, and may fork."""
    return launch(_call_ready_to_fork, (function, args), 1, timeout=LIMIT_S).values[0]


def _call_ready_to_fork(_comm: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    prepare_to_fork()
    return function(*args)


def prepare_to_fork() -> None:
    """End torch's threads and process group, which would not work in a forked process."""
    torch.set_num_threads(1)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def try_all(checks: Sequence[Check], run_case: RunCase, until_s: float = math.inf) -> Trials:
    """Run all cases and judge their outcomes. Cases in the simulator run first. Checks of cost, and
    those over Gloo, count only if the exercise's first check passes."""
    until_s = min(until_s, time.monotonic() + TOTAL_LIMIT_S)
    judged: dict[tuple[str, int], Trial] = {}  # by check and number
    _run_cases(run_case, [check for check in checks if not runs_on_gloo(check)], judged, until_s)
    trials: dict[str, list[Trial]] = {}
    for check in checks:
        right = all(trial.verdict.passed for trial in trials.get(checks[0].name, []))
        if not right and (check.requires or runs_on_gloo(check)):
            continue
        if runs_on_gloo(check):
            _run_cases(run_case, [check], judged, until_s)
        trials[check.name] = [judged[check.name, number] for number in range(len(check.cases))
                              if (check.name, number) in judged]
    return trials


def report_of(exercise: Exercise, checks: Sequence[Check], trials: Trials, known: KnownMistakes
              ) -> Report:
    """Return the report on an answer. known: the mistakes whose hints it may earn."""
    report = Report(exercise.id, exercise.title)
    failed = {name for name, each in trials.items() if not all(t.verdict.passed for t in each)}
    usual = recorded(exercise.id).hints
    for check in checks:
        if check.name in trials:
            row = _row_of(check, trials[check.name])
            if row.looked_at and not row.passed:
                possible = _not_ruled_out(check, checks, report.rows, trials, known())
                row.hint = _hint(check, trials[check.name], report.rows, possible, failed,
                                 clues.REAL if runs_on_gloo(check) else usual.get(check.name, ""))
        else:
            row = not_tried(check, f"counts once “{checks[0].name}” is right")
        report.rows.append(row)
    if any(row.actual == FAR_MORE for row in report.rows):  # so the answer has fooled its meter
        report.rows = [replace(row, passed=False, points=0, actual=FAR_MORE)
                       if check.metered and row.passed else row
                       for check, row in zip(checks, report.rows, strict=True)]
    # The traceback or table of waiting ranks, and the prints, of the first case that fails.
    failed_first = (trial.outcome for row in report.rows if row.looked_at and not row.passed
                    for trial in trials.get(row.name, []) if not trial.verdict.passed)
    if outcome := next(failed_first, None):
        failure = outcome.failure
        if failure and failure.error != "NotImplementedError":
            report.details = failure.details
        report.printed = outcome.printed_by(max(failure.rank, 0) if failure else 0)
    return report


def _not_ruled_out(check: Check, checks: Sequence[Check], earlier: Sequence[Row], trials: Trials,
                   known: Sequence[KnownMistake]) -> Sequence[KnownMistake]:
    """Return the mistakes that leave what the answer has left in the first case that failed of each
    earlier check. Where the mistake passes, it is another one if the judge is the same ("It works
    for powers of two only"); else the answer may contain two."""
    for other, row in zip(checks, earlier, strict=False):
        if row.looked_at and not row.passed:
            found = fingerprints_of(trials[other.name])
            case = next(case for case, mine in found.items() if mine is not None)
            known = [each for each in known
                     for theirs in [each.fingerprint_in(other.name, case)]
                     if alike(found[case], theirs)
                     or (theirs is None and other.judge is not check.judge)]
    return known


def runs_on_gloo(check: Check) -> bool:
    """Does the check run on real processes, over Gloo?"""
    return any(case.gloo for case in check.cases)


def _run_cases(run_case: RunCase, checks: list[Check], judged: dict[tuple[str, int], Trial],
               until_s: float) -> None:
    """Run each case once, and judge it for all checks that have it. The remaining cases are skipped
    once a case does not end, and if no case of the first check gives a result."""
    uses: dict[Case, list[tuple[Check, int, bool]]] = {}
    judged_by_values: set[Case] = set()  # the cases of checks before that judge values
    for check in checks:
        for number, case in enumerate(check.cases):
            uses.setdefault(case, []).append((check, number, case in judged_by_values))
        if check.requires is None:
            judged_by_values.update(check.cases)
    first_bad: dict[str, tuple[int, Case, Outcome]] = {}  # by check; these outcomes keep values
    stop, without_result, first = "", 0, set(checks[0].cases)
    for count, (case, its_checks) in enumerate(uses.items(), 1):
        outcome = Outcome(failure=CaseFailure("skipped", message=stop)) if stop else run_case(case)
        stop = stop or _reason_to_stop(outcome, until_s)
        for check, number, values_count_elsewhere in its_checks:
            trial = _try(check, number, case, outcome, values_count_elsewhere)
            if trial is None:
                continue
            judged[check.name, number] = trial
            if not trial.verdict.passed and number < first_bad.get(check.name, (math.inf,))[0]:
                first_bad[check.name] = number, case, replace(outcome)
        outcome.values, outcome.args_after = [], []  # they may be large
        without_result += outcome.failure is not None
        if not stop and count == without_result == len(first):
            stop = f"get “{checks[0].name}” right first"
    for name, (number, case, outcome) in first_bad.items():
        judged[name, number] = judged[name, number]._replace(clue=clues.clue(case, outcome))


def _reason_to_stop(outcome: Outcome, until_s: float) -> str:
    if outcome.failure and outcome.failure.kind == "hung":
        return f"an earlier case had not ended after {CASE_LIMIT_S} s"
    if time.monotonic() > until_s:
        return "the cases before took all the time that there is for a hand-in"
    return ""


def _try(check: Check, number: int, case: Case, outcome: Outcome, values_count_elsewhere: bool
         ) -> Trial | None:
    """Return the trial. None: the check judges the cost of right values, and these are wrong, for
    which another check takes the points."""
    verdict = verdict_of(check.requires or check.judge, case, outcome)
    if check.requires and not verdict.passed and values_count_elsewhere:
        return None
    if check.requires and verdict.passed:
        verdict = verdict_of(check.judge, case, outcome)
    sent = [outcome.trace.sent_bytes(rank) for rank in range(outcome.trace.ranks)]
    found = None if verdict.passed else fingerprint(verdict.evidence, sent)
    return Trial(number, case, outcome, verdict._replace(evidence=None), found)


def not_tried(check: Check, why: str) -> Row:
    """The row of a check that was not tried."""
    return Row(check.name, False, 0, check.points, check.tried, "not tried", why, looked_at=False)


def _row_of(check: Check, trials: Sequence[Trial]) -> Row:
    """The report's row: a summary if all trials passed, else the first that did not."""
    if not trials:
        return not_tried(check, "right values here first")
    bad = next((trial for trial in trials if not trial.verdict.passed), None)
    verdict = (bad or trials[-1]).verdict
    if bad is None:
        few = len(trials) < len(check.cases)
        tried = check.tried + few * f"; {len(trials)} of {len(check.cases)} cases have right values"
        points = check.points
    else:
        if bad.outcome.failure is not None and bad.outcome.failure.kind == "skipped":
            return not_tried(check, bad.outcome.failure.message)
        good, points = sum(trial.verdict.passed for trial in trials), 0
        tried = bad.case.tried + (len(trials) > 1) * f"; {good} of {len(trials)} cases right"
    return Row(check.name, bad is None, points, check.points, tried, verdict.actual,
               verdict.expected, verdict.nbytes, verdict.rounds)


def _hint(check: Check, trials: Sequence[Trial], earlier: Sequence[Row],
          known: Sequence[KnownMistake], failed: Set[str], usual: str) -> str:
    """Return the hint of a known mistake, or the verdict's own clue. Else the check's usual hint,
    if all earlier checks passed, as the mistake is then in what only this check tries. Else a clue
    to a mistake that can be made in any exercise, which is also preferred to a second known mistake
    if a call gave no result."""
    bad = next(trial for trial in trials if not trial.verdict.passed)
    if bad.outcome.objects and bad.verdict.nbytes:
        return clues.OBJECTS
    failure, clue, given = bad.outcome.failure, bad.clue, {row.hint for row in earlier} - {""}
    hint = hint_of(known, check.name, fingerprints_of(trials), failed, given)
    if failure and clue and given and hint not in given:  # many mistakes end with the same error
        return clue
    if hint := hint or bad.verdict.clue:
        return hint
    ended = failure is None or failure.kind in ("raised", "deadlock", "pending")
    special = ended and earlier and all(row.passed for row in earlier)
    unknown = "" if given else clues.error_clue(failure)
    if special:
        return usual or clue or unknown
    return clue or unknown or ("" if earlier else usual)


def fingerprints_of(trials: Sequence[Trial]) -> dict[int, Fingerprint | None]:
    """Return the fingerprint of each case that failed, by its number; None: the case passed."""
    return {trial.number: trial.fingerprint for trial in trials}
