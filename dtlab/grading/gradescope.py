"""Gradescope: what its autograder runs for a submission. `dtlab release --gradescope` packs it.

    python -m dtlab.grading.gradescope /autograder

reads submission/ and writes results/results.json, whatever was handed in.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from dtlab.errors import ConfigError
from dtlab.grading.class_grading import grade_hand_ins
from dtlab.grading.class_report import gradescope_results
from dtlab.grading.isolation import choose_sandbox
from dtlab.grading.submissions import find_hand_ins

SETTINGS = "settings.json"  # beside setup.sh: the class's seed, and the notebooks to hand in


def grade_submission(root: Path) -> None:
    """Grade what is in `root`/submission by the notebooks in `root`/source/course."""
    settings = json.loads((root / "source" / SETTINGS).read_text("utf-8"))
    course = root / "source" / "course"
    with tempfile.TemporaryDirectory() as unpacked:
        try:
            hand_ins = find_hand_ins(root / "submission", Path(unpacked))
            found = list(grade_hand_ins(hand_ins, course, settings["seed"],
                                        choose_sandbox()).values())
            notes = [f"{report.path}: {report.error}" for report in found if report.error]
        except ConfigError as error:
            found, notes = [], [str(error).replace(str(root), "")]
    graded = {report.chapter: report.exercises for report in found if not report.error}
    notes += [f"{chapter} is not there: hand it in, too" for chapter in settings["notebooks"]
              if chapter not in graded]
    reports = [report for chapter in sorted(graded) for report in graded[chapter]]
    results = root / "results"
    results.mkdir(exist_ok=True)
    (results / "results.json").write_text(json.dumps(gradescope_results(reports, notes), indent=1))


if __name__ == "__main__":
    grade_submission(Path(sys.argv[1]))
