"""The examples in the docstrings hold, and the docstrings begin with what a function does."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from pathlib import Path

import pytest

from tests.test_layers import modules, name_of


@pytest.mark.parametrize("path", [path for path in modules() if ">>> " in path.read_text()],
                         ids=name_of)
def test_examples_hold(path: Path) -> None:
    assert doctest.testmod(importlib.import_module(name_of(path))).failed == 0


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """Not with a question's word: "Return the ranks that …", not "Which ranks …"."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    begun = re.compile(r"(What|Which|Who|Whose|Of|How|Whether) ")
    found = [f"{name_of(path)}: {begins[:40]}" for path in modules()
             for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)
             if begun.match(begins := ast.get_docstring(node) or "")]
    assert not found
