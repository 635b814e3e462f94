"""Errors are one family, say what happened, and survive a journey between processes."""

from __future__ import annotations

import pickle

import cloudpickle
import pytest

from dtlab import errors
from dtlab.errors import (
    ConfigError,
    Deadlock,
    DtlabError,
    RankDied,
    RankFailed,
    RunTimeout,
    ShapeMismatch,
    TypeMismatch,
    Waiting,
    waiting_table,
)

ROWS = [Waiting(0, "send", "1", 4_000, "a.py:3 in f"), Waiting(1, "returned")]


def test_all_are_of_one_family_and_of_pythons_own_where_it_has_one() -> None:
    family = [x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, Exception)]
    assert len(family) == 11
    assert all(issubclass(x, DtlabError) for x in family)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ShapeMismatch, ValueError)
    assert issubclass(Deadlock, RunTimeout)
    assert issubclass(RunTimeout, TimeoutError)


def test_the_table_is_aligned_and_has_no_line_that_ends_in_blanks() -> None:
    assert waiting_table(ROWS).splitlines() == [
        "rank  doing     with  bytes  at",
        "   0  send      1     4,000  a.py:3 in f",
        "   1  returned",
    ]


def test_a_time_out_carries_the_table_in_its_text_and_as_data() -> None:
    error = Deadlock("stuck", ROWS)
    assert str(error) == "stuck\n" + waiting_table(ROWS)
    assert error.waiting == ROWS
    assert str(RunTimeout("late")) == "late"


def test_what_a_rank_raised_can_be_caught_as_that() -> None:
    error = RankFailed.from_rank(3, ShapeMismatch("3 is not 4"), "Traceback …\n  line\n")
    assert isinstance(error, ShapeMismatch)
    assert isinstance(error, RankFailed)
    assert type(error).__name__ == "RankFailed"
    assert (error.rank, error.traceback_text) == (3, "Traceback …\n  line\n")
    assert str(error) == "rank 3 raised ShapeMismatch: 3 is not 4\n\nTraceback …\n  line"
    plain = RankFailed.from_rank(0, KeyError("k"), "")
    assert type(plain) is RankFailed
    assert isinstance(plain.__cause__, KeyError)
    assert RankFailed.from_rank(1, "it can't travel", "").__cause__ is None


@pytest.mark.parametrize("error", [
    ConfigError("no"), ShapeMismatch("no"), TypeMismatch("no"), RunTimeout("late", ROWS),
    Deadlock("stuck", ROWS), RankDied("gone", 2, -9),
    RankFailed.from_rank(1, ValueError("x"), "text"),
    RankFailed.from_rank(1, ShapeMismatch("x"), "text"),
], ids=lambda error: type(error).__name__)
def test_errors_travel(error: DtlabError) -> None:
    back = pickle.loads(cloudpickle.dumps(error))
    assert str(back) == str(error)
    assert vars(back) == vars(error)
    assert isinstance(back, type(error).__mro__[1])
