"""The gallery: attacks earn nothing, leave nothing, and change no one else's grade."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtlab import ConfigError
from dtlab.grading.isolation import choose_sandbox
from tests.gallery import ATTACKS
from tests.gallery.run import notebook_of, run_gallery

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["patches the report's points", "unpickled", "a channel: System V", "calls the solution",
         "the test's cell says 4", "kills its parent",
         "in colors and keys", "read and executed: find-rings", "layers that take no time",
         "steps on weights that fill the referee's memory", "lives that hand a training over",
         "in the name of a file, as text", "answer once they are dead", "gathered in each step",
         "one stage, on one rank: one-f-one-b", "a number in a tensor"]


def test_names_tell_the_attacks_apart():
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    for attack in ATTACKS:
        json.dumps(notebook_of(attack, ROOT / "solutions"))


@pytest.mark.timeout(600)
def test_the_grader_holds():
    try:
        box = choose_sandbox("bubblewrap")
    except ConfigError as error:
        pytest.skip(str(error))
    outcomes = list(run_gallery(box, QUICK))
    assert len(outcomes) >= len(QUICK)
    assert not [outcome for outcome in outcomes if not outcome.held]
