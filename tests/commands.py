"""The command line, called in this process as a person or a script would."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from dtlab.cli import app


def call(*words: Any) -> Any:
    return CliRunner().invoke(app, [*map(str, words)])


def data(*words: Any) -> Any:
    """What a command prints with --json."""
    result = call(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def assert_bad_input(result: Any, says: str) -> None:
    """Refused in one sentence, and nothing else was printed."""
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
