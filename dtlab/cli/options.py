"""Options that several commands have in common."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Ranks = Annotated[int, typer.Option("--ranks", "-p", help="How many processes.")]
Repeats = Annotated[int, typer.Option(help="Repetitions; the median counts.")]
Sizes = Annotated[str, typer.Option(
    "--bytes", "-n", help="Sizes, with commas: 64kB (10³), 1MiB (2²⁰).")]
Device = Annotated[str, typer.Option(help="cpu, or cuda: the ranks take GPUs in turn.")]
Backend = Annotated[str, typer.Option(help="gloo, or nccl, which takes a GPU for each rank.")]
