"""The output of commands: a table for people, JSON for scripts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtlab.errors import ConfigError

LONGEST = 160  # characters of a line


def console() -> Console:
    """Standard output. A pipe has no width: there, lines are as long as they need to be."""
    return Console() if sys.stdout.isatty() else Console(width=LONGEST, highlight=False)


def progress_console() -> Console:
    """Return the console for progress: standard error, and only if a person watches it."""
    return Console(stderr=True, quiet=not sys.stderr.isatty())


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under their columns: text to the left, all else to the right. Where a terminal is
    too narrow, the first column's text is broken between words; nothing is cut off."""
    made = Table(box=None, pad_edge=False, padding=(0, 2 if len(columns) < 8 else 1, 0, 0),
                 header_style="bold")
    listed = [list(row) for row in rows]
    for number, name in enumerate(columns):
        is_text = all(isinstance(row[number], str) for row in listed)
        widest = max(map(cell_len, [name, *(str(row[number]) for row in listed)]))
        made.add_column(name, justify="left" if is_text and number == 0 else "right",
                        no_wrap=number > 0, min_width=widest if number else None)
    for row in listed:
        made.add_row(*(Text(str(cell)) for cell in row))
    if title:
        typer.secho(title, bold=True)
    page = console()
    wide = page.options.update_width(LONGEST)
    page.width = max(page.width, page.measure(made, options=wide).minimum)
    page.print(made)


def check_picture(path: Path | None) -> None:
    """Raise `ConfigError` now, not after the work, if a picture can't be written there."""
    if path is None:
        return
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{path}: a picture's name ends in .png, .svg or .pdf")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Raise `ConfigError` now, not after the work, if no file can be written there."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{path}: there is no folder {folder}")
    if path.is_dir():
        raise ConfigError(f"{path}: there is a folder of that name")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{path}: you may not write there")


def json_out(value: Any) -> None:
    """Print `value` as JSON, indented, keys in their order."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))
