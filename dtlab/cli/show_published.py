"""`dtlab show`: tables that the course stands on."""

from __future__ import annotations

from itertools import groupby

import typer
from rich.table import Table

from dtlab.cli import show
from dtlab.cli.errors import with_exit_codes
from dtlab.cli.options import AsJson

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Print tables that the course stands on.")


@app.callback()
def show_command() -> None:
    """Print tables that the course stands on."""


@app.command()
@with_exit_codes
def published(as_json: AsJson = False) -> None:
    """Figures from papers beside our own. Exit code 1 if one does not compare as it should."""
    from dtlab.published import PUBLISHED

    rows = [row.computed() for row in PUBLISHED]
    if as_json:
        show.json_out([{"source": row.source, "what": row.what, "printed": row.printed,
                        "ours": row.compute(), "unit": row.unit, "tolerance": row.tolerance,
                        "verdict": row.verdict, "holds": row.holds} for row in rows])
    else:
        for source, of_it in groupby(rows, key=lambda row: row.source):
            typer.secho(source, bold=True)
            table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", expand=True)
            table.add_column("what", ratio=1)
            for name in ("printed", "ours", "±", "unit", "verdict", ""):
                table.add_column(name, justify="right", no_wrap=name not in ("unit", "verdict"))
            for row in of_it:
                ours = row.compute()
                table.add_row(row.what, f"{row.printed:,}", f"{ours:,.4g}" if abs(ours) < 1000
                              else f"{ours:,.0f}", f"{row.tolerance:,.3g}", row.unit, row.verdict,
                              "✓" if row.holds else "✗")
            show.console().print(table)
    if not all(row.holds for row in rows):
        raise typer.Exit(1)
