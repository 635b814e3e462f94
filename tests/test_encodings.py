"""Terminals that know fewer letters: what they lack is replaced, and nothing else changes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import dtlab
from dtlab.topology import uniform

RANKS = r"""
import dtlab
dtlab.run(lambda comm: print('\u2713', comm.rank), ranks=2)
dtlab.simulate(lambda comm: print('\u2713', comm.rank), network=dtlab.topology.uniform(2, 1, 1))
"""


@pytest.mark.parametrize(("encoding", "words"), [
    ("gbk", ["-m", "dtlab", "simulate", "all_reduce", "-n", "1MB"]), ("latin-1", ["-c", RANKS])])
def test_what_a_terminal_lacks_is_replaced(encoding: str, words: list[str]) -> None:
    """And the course reads its own files in any locale, also where there are no docstrings."""
    env = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "LC_ALL": "C",
                        "PYTHONCOERCECLOCALE": "0", "PYTHONOPTIMIZE": "2"}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    if words[0] == "-c":
        said = sorted(done.stdout.decode(encoding).splitlines())
        assert said == sorted(["[rank 0] ? 0", "[rank 1] ? 1"] * 2)


def test_elsewhere_nothing_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    dtlab.simulate(lambda comm: print("✓"), network=uniform(1, 1, 1))
    assert capsys.readouterr().out == "[rank 0] ✓\n"
