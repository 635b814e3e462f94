"""Gradescope: what its autograder runs for a submission. `dtlab release --gradescope` packs it.

    python -m dtlab.grading.gradescope /autograder

reads submission/ and writes results/results.json, whatever was handed in.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from dtlab.errors import ConfigError, DtlabError
from dtlab.grading.class_report import gradescope_results
from dtlab.grading.notebook import grade_notebook
from dtlab.grading.report import Report
from dtlab.grading.submissions import find_hand_ins

SETTINGS = "settings.json"  # beside setup.sh: the class's seed, and the notebooks to hand in


def grade_submission(root: Path) -> None:
    """Grade what is in `root`/submission by the notebooks in `root`/source/course."""
    settings = json.loads((root / "source" / SETTINGS).read_text("utf-8"))
    course = root / "source" / "course"
    graded: dict[str, list[Report]] = {}
    notes = []
    with tempfile.TemporaryDirectory() as unpacked:
        try:
            for each in find_hand_ins(root / "submission", Path(unpacked)):
                try:
                    if each.problem:
                        raise ConfigError(f"{each.file}: {each.problem}")
                    report = grade_notebook(each.file, course, settings["seed"])
                    graded[report.chapter] = report.exercises
                except DtlabError as error:
                    notes.append(str(error).replace(str(each.file), each.name))
        except ConfigError as error:
            notes.append(str(error).replace(str(root), ""))
    notes += [f"{chapter} is not there: hand it in, too" for chapter in settings["notebooks"]
              if chapter not in graded]
    reports = [report for chapter in sorted(graded) for report in graded[chapter]]
    results = root / "results"
    results.mkdir(exist_ok=True)
    (results / "results.json").write_text(json.dumps(gradescope_results(reports, notes), indent=1))


if __name__ == "__main__":
    grade_submission(Path(sys.argv[1]))
