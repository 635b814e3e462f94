"""`dtlab show`: tables that the course stands on."""

from __future__ import annotations

from typing import Annotated

import typer

from dtlab.cli import show
from dtlab.cli.errors import with_exit_codes

app = typer.Typer(no_args_is_help=True, help="Print tables that the course stands on.")


@app.callback()
def show_command() -> None:
    """Print tables that the course stands on."""


@app.command()
@with_exit_codes
def published(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Figures from papers beside our own. Exit code 1 if one does not compare as it should."""
    from dtlab.published import PUBLISHED

    if as_json:
        show.json_out([{"source": row.source, "what": row.what, "printed": row.printed,
                        "ours": row.compute(), "unit": row.unit, "tolerance": row.tolerance,
                        "verdict": row.verdict, "holds": row.holds} for row in PUBLISHED])
    else:
        show.table(
            "Published figures, and ours",
            ("source", "what", "printed", "ours", "unit", "verdict", ""),
            [(row.source, row.what, f"{row.printed:,}", f"{round(row.compute(), 2):,}", row.unit,
              row.verdict, "✓" if row.holds else "✗") for row in PUBLISHED],
        )
    if not all(row.holds for row in PUBLISHED):
        raise typer.Exit(1)
