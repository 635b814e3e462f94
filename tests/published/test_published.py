"""Every published figure compares with ours as its row says."""

from __future__ import annotations

import json
from functools import partial

import pytest
from typer.testing import CliRunner

from dtlab import cost
from dtlab.cli import app
from dtlab.errors import ConfigError
from dtlab.published import DISAGREE, MATCH, PUBLISHED, Published


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.source}: {row.what}")
def test_a_published_figure_compares_as_it_is_said_to(row: Published) -> None:
    assert row.holds, f"printed {row.printed} {row.unit}, ours {row.compute()}"


def test_a_row_that_does_not_hold_says_so() -> None:
    wrong = PUBLISHED[0]._replace(printed=121)
    assert not wrong.holds
    assert wrong._replace(verdict=DISAGREE).holds
    assert wrong._replace(verdict="open").holds
    assert {row.verdict for row in PUBLISHED} >= {MATCH, DISAGREE}


def test_the_page_prints_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed is looked at above."""
    monkeypatch.setattr("dtlab.published.PUBLISHED", [row._replace(compute=partial(
        float, row.printed + (row.verdict == DISAGREE) * (10 * row.tolerance + 1)))
        for row in PUBLISHED])
    rows = json.loads(CliRunner().invoke(app, ["show", "published", "--json"]).stdout)
    assert [row["what"] for row in rows] == [row.what for row in PUBLISHED]
    page = CliRunner().invoke(app, ["show", "published"])
    assert page.exit_code == 0
    assert "31.4" in page.stdout


@pytest.mark.parametrize(("arguments", "sentence"), [
    ((7e9, 64, 4), "stages 1, 2 and 3"), ((-1,), "parameters must be"), ((1, 0), "ranks must be"),
    (("7B",), "parameters must be"),
])
def test_model_state_of_nonsense_is_refused(arguments: tuple[float, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        cost.model_state_bytes(*arguments)  # type: ignore[arg-type]
