"""Runs the gallery: each attack, what it leaves behind, and the honest hand-in after it."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtlab.grading.exercise import find_exercise
from dtlab.grading.isolation import HOME, choose_sandbox
from dtlab.grading.notebook import NotebookReport, grade_notebook, grade_notebooks
from dtlab.grading.submitted import course_folder
from tests.gallery import ATTACKS
from tests.gallery.attack import MARK, RIGHT, Attack, hello
from tests.gallery.notebooks import cell_of

SOLUTION = hello("no attack: the solution", RIGHT)
STUB = hello("no attack: not written yet", "raise NotImplementedError")
EVERYTHING = (SOLUTION, STUB, *ATTACKS)
SEED = 8062477193  # as a class has: nobody finds it by trying
GRACE_S = 5.0  # a namespace that has been killed takes a moment to go
_OF_A_SANDBOX = f"HOME={HOME}".encode()
_OF_THE_GALLERY = b"DTLAB_GALLERY=1"
_PLACES = ("/tmp", "/dev/shm", str(Path.home()), ".")  # where an attack may try to leave a file


@dataclass(frozen=True)
class Outcome:
    """What came of an attack. points: of the exercise that it attacks; wanted: all for the
    solution itself; of others at most what their honest part earns."""

    name: str
    points: float
    max_points: float
    wanted: float
    left: str  # what it left behind; "" if nothing
    next_points: float  # of the honest hand-in after it, which shares its servers
    next_max: float
    seconds: float

    @property
    def held(self) -> bool:
        """Has the grader held?"""
        right = self.points == self.wanted if self.name == SOLUTION.name else (
            self.points <= self.wanted)
        good = right and self.next_points == self.next_max
        return good and not self.left


def run_gallery(sandbox: str | None = None, only: Sequence[str] = ("",),
                course: Path | None = None) -> Iterator[Outcome]:
    """Each attack whose name contains one of `only`, one after the other, in this sandbox."""
    box = choose_sandbox(sandbox)
    os.environ["DTLAB_GALLERY"] = "1"  # inherited by what the sandbox "none" starts
    solutions = course_folder(course)
    with tempfile.TemporaryDirectory() as name:
        honest = solutions / "00_welcome.ipynb"
        grade_notebook(honest, solutions, sandbox=box)  # starts what then stays
        for attack in EVERYTHING:
            if any(part in attack.name for part in only):
                file = Path(name) / "attack.ipynb"
                file.write_text(json.dumps(notebook_of(attack, solutions)))
                yield _try(attack, file, honest, solutions, box)


def notebook_of(attack: Attack, solutions: Path) -> dict[str, Any]:
    """What the attacker hands in."""
    chapter = find_exercise(attack.exercise).chapter
    (source,) = solutions.glob(f"{chapter}_*.ipynb")
    notebook: dict[str, Any] = json.loads(source.read_text())
    for cell in notebook["cells"]:
        if cell["metadata"].get("nbgrader", {}).get("solution"):
            cell["source"] = "raise NotImplementedError"
    cell_of(notebook, attack.exercise)["source"] = attack.code
    if attack.edit is not None:
        attack.edit(notebook)
    return notebook


def _try(attack: Attack, file: Path, honest: Path, solutions: Path, box: str) -> Outcome:
    began, before = time.monotonic(), _traces()
    report, after = grade_notebooks([file, honest], solutions, SEED, box)
    points = _points(report, attack.exercise)
    until_s = time.monotonic() + GRACE_S
    while (left := sorted(_traces() - before)) and time.monotonic() < until_s:
        time.sleep(0.1)
    for trace in left:
        if trace.startswith("/"):
            Path(trace).unlink(missing_ok=True)
    wanted = points[1] if attack is SOLUTION else attack.most
    return Outcome(attack.name, *points, wanted, ", ".join(left), after.points, after.max_points,
                   time.monotonic() - began)


def _points(report: NotebookReport, exercise: str) -> tuple[float, float]:
    (found,) = [each for each in report.exercises if each.exercise == exercise]
    # A rank alone has its sum already, whatever it does.
    return found.points, found.max_points


def _traces() -> set[str]:
    """What attacks leave: marked files, and processes of their own sessions."""
    found = {str(file) for place in _PLACES for file in Path(place).glob(f"*{MARK}*")}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            environment = (stat.parent / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        fields = rest.split()
        ours = _OF_A_SANDBOX in environment or _OF_THE_GALLERY in environment
        if ours and fields[1] == "1" and fields[0] != "Z":  # its parent is gone, and it lives
            found.add(f"process {stat.parent.name} ({name})")
    return found
