"""The prose of a chapter, for the tests of its claims: test_claims_07.py reads notebooks/07_*."""

from __future__ import annotations

import pytest

from tests.notebooks.chapter import Chapter


@pytest.fixture(scope="module")
def prose(request: pytest.FixtureRequest) -> str:
    return Chapter(request.path.stem.removeprefix("test_claims_")).prose
