"""The examples in the docstrings hold."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = {"base": 2, "changes": 1, "compose": 1, "cycles": 3, "meshes": 2, "names": 2,
           "servers": 3, "traffic": 3, "trees": 2}


@pytest.mark.parametrize(("module", "examples"), MODULES.items())
def test_examples_hold(module: str, examples: int) -> None:
    result = doctest.testmod(importlib.import_module(f"dtlab.topology.{module}"))
    assert result.failed == 0
    assert result.attempted >= examples
