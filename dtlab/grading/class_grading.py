"""Grading a class. Each learner's hand-ins run in their own processes; results are kept for the
next call."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import dtlab
from dtlab.errors import ConfigError
from dtlab.grading.isolation import PACKAGE, choose_sandbox
from dtlab.grading.notebook import ENDED, NotebookReport, grade_notebooks
from dtlab.grading.report import printable
from dtlab.grading.submissions import HandIn, find_hand_ins, is_late
from dtlab.grading.submitted import course_folder

BATCH = 4  # hand-ins; more would make progress coarse, and leave `jobs` idle


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
    """Grade the hand-ins below `folder`, `jobs` batches at a time; reports of an earlier call with
    the same seed, checks and course are taken from `out`. If a learner has two hand-ins for the
    same notebook, the later one counts; if they are of the same time, or in one zip, the one saved
    later.

    watch: sees the hand-ins as they are done. Raises `ConfigError` if there is nothing to grade, no
    sandbox, or if `out` lies in `folder`.
    """
    folder, out = folder.resolve(), out.resolve()
    if out.is_relative_to(folder):
        raise ConfigError(f"{out} lies in {folder}, where submissions are: write results elsewhere")
    if seed is None and course_folder(course).name == "exercises":
        raise ConfigError("there are no solutions here, so no hidden inputs: draw them by --seed")
    sandbox = choose_sandbox(sandbox)
    hand_ins = find_hand_ins(folder, out / "unpacked")
    cache = out / "graded"
    cache.mkdir(parents=True, exist_ok=True)
    graders = (PACKAGE / "grading").rglob("*.py")  # if a check has changed, all is graded again
    rules = (f"{seed} {dtlab.__version__} {_digest_of(course_folder(course).glob('*.ipynb'))} "
             f"{_digest_of(graders)}")

    def file_of(hand_in: HandIn) -> Path:
        key = hashlib.sha256(f"{rules} {hand_in.name} {hand_in.digest}".encode()).hexdigest()[:24]
        return cache / f"{key}.json"

    def grade(batch: list[HandIn]) -> dict[HandIn, NotebookReport]:
        reports = grade_hand_ins(batch, course, seed, sandbox)
        for each, report in reports.items():
            if ENDED not in report.error:  # maybe the machine's fault: try again next time
                _write_atomically(file_of(each), json.dumps(report.to_dict()
                                                       | {"answers": report.answers}))
        return reports

    reports = {each: NotebookReport.from_dict(json.loads(file_of(each).read_text("utf-8")))
               for each in hand_ins if file_of(each).exists()}

    def graded_in_turn() -> Iterator[HandIn]:
        remaining = [each for each in hand_ins if each not in reports]
        yield from list(reports)
        for done in as_completed([pool.submit(grade, batch) for batch in batches(remaining)]):
            reports.update(done.result())
            yield from done.result()

    pool = ThreadPoolExecutor(jobs)
    try:
        for _ in watch(graded_in_turn(), len(hand_ins)):
            pass
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    late = {each for each in hand_ins if is_late(each.name)
            or (deadline is not None and each.handed_in > deadline)}
    graded = [Graded(each, reports[each], each in late) for each in hand_ins]
    _mark_superseded(graded)
    return graded


def batches(hand_ins: Iterable[HandIn]) -> list[list[HandIn]]:
    """Split the hand-ins into batches of at most `BATCH`, each of one learner (or of none)."""
    by_learner: dict[str, list[HandIn]] = {}
    for each in hand_ins:
        by_learner.setdefault(each.learner, []).append(each)
    return [theirs[first:first + BATCH] for theirs in by_learner.values()
            for first in range(0, len(theirs), BATCH)]


def grade_hand_ins(batch: Sequence[HandIn], course: Path | None, seed: int | None, sandbox: str
                   ) -> dict[HandIn, NotebookReport]:
    """Return the reports on one batch. A hand-in that can't be graded has a report, too."""
    files = [each.file for each in batch if not each.problem]
    graded = iter(grade_notebooks(files, course, seed, sandbox))
    reports = {}
    for each in batch:
        report = NotebookReport("", error=each.problem) if each.problem else next(graded)
        why = report.error.replace(f"{each.file}: ", "").replace(str(each.file), "it")
        report.path, report.error = each.name, printable(why)
        reports[each] = report
    return reports


def _mark_superseded(graded: list[Graded]) -> None:
    """Let only the last hand-in of each learner for each notebook count."""
    last: dict[tuple[str, str], Graded] = {}
    for each in sorted(graded, key=lambda g: (g.hand_in.handed_in, g.hand_in.saved,
                                               g.hand_in.name)):
        key = each.hand_in.learner, each.report.chapter
        if each.report.error:
            continue
        if key in last:
            last[key].counts = False
        last[key] = each


def _digest_of(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


def _write_atomically(file: Path, text: str) -> None:
    """Write all of the text or nothing, even if the run is interrupted."""
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)
