"""The examples in the docstrings hold."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from tests.test_layers import modules, name_of


@pytest.mark.parametrize("path", [path for path in modules() if ">>> " in path.read_text()],
                         ids=name_of)
def test_examples_hold(path: Path) -> None:
    assert doctest.testmod(importlib.import_module(name_of(path))).failed == 0
