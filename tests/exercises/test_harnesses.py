"""What our code carries into a learner's process: nothing that could answer the exercise.

A harness runs where the learner's function sees its callers' frames, and all that is reachable from
them; so do the arguments. Pickled by value, they may refer to torch, numpy and the library's public
modules, not to the graders' own.
"""

from __future__ import annotations

import pickle
import pickletools
import subprocess
import sys

import cloudpickle
import pytest
import torch
from torch.utils._pytree import tree_leaves

from dtlab.grading import catalogue, exercises

HARNESSED = sorted({exercise.id for exercise in catalogue().values() for check in exercise.build(0)
                    for case in check.cases if case.harness})
SECRETS = ("right", "reference", "OTHERS", "MISTAKES", "Verdict", "Outcome", "all_of", "WRONG",
           "wanted", "expected", "clue", "_CLUES")


@pytest.fixture
def by_value():
    cloudpickle.register_pickle_by_value(exercises)
    yield
    cloudpickle.unregister_pickle_by_value(exercises)


def words(pickled: bytes) -> set[str]:
    """All texts in a pickle: the modules, classes and names that it refers to among them."""
    return {str(argument) for _, argument, _ in pickletools.genops(pickled)
            if isinstance(argument, str)}


@pytest.mark.parametrize("exercise", HARNESSED)
def test_a_harness_carries_neither_the_grader_nor_the_answer(exercise, by_value):
    for case in {case for check in catalogue()[exercise].build(0) for case in check.cases}:
        text = words(cloudpickle.dumps(case.harness))
        assert not {word for word in text if word in SECRETS}
        files = {word for word in text if word.startswith("dtlab.")}
        assert not {f for f in files if f.startswith("dtlab.grading")
                    and not f.startswith("dtlab.grading.exercises")}  # names of what is by value
        assert "dtlab.grading" not in " ".join(words(pickle.dumps(case.args)))


@pytest.mark.parametrize("exercise", catalogue())
def test_no_tensor_that_a_rank_gets_is_a_part_of_more(exercise):
    """Its memory comes along, and with it what other ranks have."""
    for args in (args for check in catalogue()[exercise].build(0) for case in check.cases
                 for args in case.args):
        tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        memory = {x.data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        assert sum(memory.values()) <= sum(x.nbytes for x in tensors)


def test_harnesses_open_where_the_graders_cannot_be_imported(by_value, tmp_path):
    harnesses = [case.harness for exercise in HARNESSED
                 for check in catalogue()[exercise].build(0) for case in check.cases]
    (tmp_path / "harnesses").write_bytes(cloudpickle.dumps(harnesses))
    program = ("import pickle, sys\n"
               "for name in ('dtlab.grading', 'dtlab.grading.exercises'):\n"
               "    sys.modules[name] = None\n"
               "pickle.load(open(sys.argv[1], 'rb'))\n")
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "harnesses"],
                          capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
