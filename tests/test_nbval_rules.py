"""What two runs of a notebook may differ in, and what they may not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nbval.plugin import get_sanitize_patterns

from conftest import in_order_of_ranks

RULES = (Path(__file__).parent / "nbval_sanitize.cfg").read_text()


def sanitized(text: str) -> str:
    text = in_order_of_ranks(text)
    for pattern, replacement in get_sanitize_patterns(RULES):
        text = re.sub(pattern, replacement, text)
    return text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("<object at 0x7f3a12bc90>", "<object at 0x7f0012bc90>"),
        ("<Figure size 640x480 with 1 Axes>", "<Figure size 800x480 with 1 Axes>"),
        ("4  Cell In[1]:6 in step", "4  Cell In[33]:6 in step"),
        ("[rank 1] b\n[rank 0] a\n[rank 1] c\n", "[rank 0] a\n[rank 1] b\n[rank 1] c\n"),
        ("start\n[rank 10] b\n[rank 2] a\nend", "start\n[rank 2] a\n[rank 10] b\nend"),
        ("Cell In[1]:5 in dizzy", "Cell In[26]:5 in dizzy"),
        ("File /home/ada/dtlab/notebooks/x.ipynb", "File /srv/course/notebooks/x.ipynb"),
    ],
)
def test_what_may_differ_is_made_equal(one: str, other: str) -> None:
    assert sanitized(one) == sanitized(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("[rank 0] a\n[rank 0] b\n", "[rank 0] b\n[rank 0] a\n"),
        ("[rank 0] a\n", "[rank 1] a\n"),
        ("17.6 ms of virtual time", "17.7 ms of virtual time"),
        ("175,000,000 bytes", "175,000,004 bytes"),
        ("14 rounds", "15 rounds"),
        ("Cell In[1]:5 in dizzy", "Cell In[1]:6 in dizzy"),
    ],
)
def test_a_fact_that_changes_is_noticed(one: str, other: str) -> None:
    assert sanitized(one) != sanitized(other)
