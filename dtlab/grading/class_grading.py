"""Grading a class: every hand-in once, each in processes of its own, with results that stay."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import dtlab
from dtlab.errors import ConfigError
from dtlab.grading.isolation import PACKAGE, choose_sandbox
from dtlab.grading.notebook import ENDED, NotebookReport, grade_notebook
from dtlab.grading.report import printable
from dtlab.grading.submissions import HandIn, find_hand_ins, is_late
from dtlab.grading.submitted import course_folder


@dataclass
class Graded:
    """A hand-in and its report. counts: False if the same learner handed in a later one."""

    hand_in: HandIn
    report: NotebookReport
    late: bool = False
    counts: bool = True


def grade_class(
    folder: Path, out: Path, *, jobs: int = 1, seed: int | None = None,
    sandbox: str | None = None, course: Path | None = None, deadline: datetime | None = None,
    watch: Callable[[Iterable[Any], int], Iterable[Any]] = lambda each, total: each,
) -> list[Graded]:
    """Grade what lies below `folder`, `jobs` hand-ins at a time; what was graded before, with the
    same seed, checks and course, is taken from `out`. Of two hand-ins of one learner for the same
    notebook the later one counts; of two of the same time, or in one zip, the one saved later.

    watch: sees the hand-ins as they are done. Raises `ConfigError` if there is nothing to grade, no
    sandbox, or if `out` lies in `folder`.
    """
    folder, out = folder.resolve(), out.resolve()
    if out.is_relative_to(folder):
        raise ConfigError(f"{out} lies in {folder}, where submissions are: write results elsewhere")
    if seed is None and course_folder(course).name == "exercises":
        raise ConfigError("there are no solutions here, so no hidden inputs: draw them by --seed")
    box = choose_sandbox(sandbox)
    hand_ins = find_hand_ins(folder, out / "unpacked")
    kept = out / "graded"
    kept.mkdir(parents=True, exist_ok=True)
    rules = f"{seed} {dtlab.__version__} {_digest_of(course_folder(course))} {_checks_digest()}"

    def grade(hand_in: HandIn) -> NotebookReport:
        key = hashlib.sha256(f"{rules} {hand_in.name} {hand_in.digest}".encode()).hexdigest()[:24]
        file = kept / f"{key}.json"
        if file.exists():
            return NotebookReport.from_dict(json.loads(file.read_text()))
        report = grade_hand_in(hand_in, course, seed, box)
        if ENDED not in report.error:  # that may have been the machine: try again
            _write_whole(file, json.dumps(report.to_dict() | {"answers": report.answers}))
        return report

    reports: dict[HandIn, NotebookReport] = {}
    pool = ThreadPoolExecutor(jobs)
    try:
        begun = {pool.submit(grade, hand_in): hand_in for hand_in in hand_ins}
        for done in watch(as_completed(begun), len(begun)):
            reports[begun[done]] = done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    late = {each for each in hand_ins if is_late(each.name)
            or (deadline is not None and each.handed_in > deadline)}
    graded = [Graded(each, reports[each], each in late) for each in hand_ins]
    _leave_the_last(graded)
    return graded


def grade_hand_in(hand_in: HandIn, course: Path | None, seed: int | None, box: str
                  ) -> NotebookReport:
    """A hand-in that can't be graded is a report too."""
    if hand_in.problem:
        return NotebookReport(hand_in.name, error=hand_in.problem)
    try:
        report = grade_notebook(hand_in.file, course, seed, box)
    except ConfigError as error:
        why = str(error).replace(f"{hand_in.file}: ", "").replace(str(hand_in.file), "it")
        report = NotebookReport(hand_in.name, error=printable(why))
    report.path = hand_in.name
    return report


def _leave_the_last(graded: list[Graded]) -> None:
    last: dict[tuple[str, str], Graded] = {}
    for each in sorted(graded, key=lambda g: (g.hand_in.handed_in, g.hand_in.saved,
                                               g.hand_in.name)):
        key = each.hand_in.learner, each.report.chapter
        if each.report.error:
            continue
        if key in last:
            last[key].counts = False
        last[key] = each


def _digest_of(folder: Path) -> str:
    files = sorted(folder.glob("*.ipynb"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _checks_digest() -> str:
    """Of all that grades: a changed check grades anew."""
    files = sorted((PACKAGE / "grading").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _write_whole(file: Path, text: str) -> None:
    """All of it or nothing: an interrupted run must not leave half a result."""
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)
