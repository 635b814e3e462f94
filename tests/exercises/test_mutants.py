"""`make mutants`: what is mutated, and that a mutant which still earns all points is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from mutations import mutants  # noqa: E402

CELL = '''\
def shifted(comm, x):
    """Not mutated: 1 + 1."""
    ### BEGIN SOLUTION
    right, left = (comm.rank + 1) % comm.size, 0
    if right < 3:
        comm.isend(x, right).wait()
    return x[left:]
    ### END SOLUTION
'''


@pytest.mark.parametrize(("before", "after"), [
    ("right, left = ((comm.rank + 1) % comm.size, 0)",
     "right, left = ((comm.rank - 1) % comm.size, 0)"),
    ("right, left = ((comm.rank + 1) % comm.size, 0)", "right, left = (comm.rank + 1, 0)"),
    ("if right < 3:", "if right <= 3:"),
    ("if right < 3:", "if right < 4:"),
    ("if right < 3:", "if not right < 3:"),
    ("if right < 3:", "if left < 3:"),
    ("comm.isend(x, right).wait()", "pass"),
    ("comm.isend(x, right).wait()", "comm.isend(x, right)"),
    ("comm.isend(x, right).wait()", "comm.isend(right, x).wait()"),
    ("return x[left:]", "return"),
    ("return x[left:]", "return x[right:]"),
])
def test_the_slips_that_people_make_are_among_the_mutants(before, after):
    assert (before, after) in {(m.before, m.after) for m in mutants(CELL)}


def test_nothing_outside_the_marks_is_mutated_and_no_mutant_comes_twice():
    found = list(mutants(CELL))
    assert len({m.code for m in found}) == len(found) > 20
    assert all("1 + 1." in m.code and "def shifted(comm, x):" in m.code for m in found)


def test_mutants_of_an_answer_lose_points():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "mutants.py", "hello-ranks",
                           "--limit", "3", "--seed", "1", "-j", "1"],
                          capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[1].split()[:3] == ["hello-ranks", "3", "3"]
