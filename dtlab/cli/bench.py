"""`dtlab bench`: how fast this is here, always beside a peer measured in the same run."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from dtlab.cli import show
from dtlab.cli.errors import with_exit_codes
from dtlab.cli.options import AsJson, Backend, Device, Ranks, Repeats, Sizes
from dtlab.collectives import ALGORITHMS
from dtlab.errors import ConfigError
from dtlab.units import bytes_of

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Measure, beside a peer in the same run.")
Plot = Annotated[Path | None, typer.Option(help="Draw the figures there (PNG, SVG, PDF).")]


@app.command()
@with_exit_codes
def collectives(
    names: Annotated[list[str] | None, typer.Argument(
        help="Which collectives; without any, all of them.")] = None,
    ranks: Ranks = 4,
    sizes: Sizes = "64KiB,1MiB,16MiB",
    algorithm: Annotated[str | None, typer.Option(
        "--algorithm", "-a", help="Only this one (and torch's).")] = None,
    repeats: Repeats = 9,
    device: Device = "cpu",
    backend: Backend = "gloo",
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Time each algorithm and torch.distributed's own, taking turns in one run.

    As nccl-tests prints: algorithm bandwidth is bytes/time; bus bandwidth is comparable between
    rank counts.
    """
    from dtlab.bench import measure
    from dtlab.collectives.registry import check_algorithm

    show.check_picture(plot)
    wanted = names or list(ALGORITHMS)
    for name in wanted:
        check_algorithm(name, "auto" if algorithm is None else algorithm)
    lengths = [bytes_of(size) for size in sizes.split(",")]
    jobs = [(name, nbytes) for name in wanted
            for nbytes in (lengths if name != "barrier" else [0])]
    chosen = [algorithm] if algorithm else []
    rows = [row for name, nbytes in watched(jobs, "measuring")
            for row in measure(name, nbytes, ranks, chosen, repeats, device=device,
                               backend=backend)]
    if plot:
        from dtlab.cli.bench_plot import bandwidths

        if not any(row.bus_Bps for row in rows):
            raise ConfigError("there is nothing to draw: a barrier has no size; name another one")
        bandwidths(rows).savefig(plot)
    if as_json:
        show.json_out([row._asdict() for row in rows])
    else:
        print_collectives(rows)


def watched(jobs: list[Any], doing: str) -> Any:
    """The jobs, with a progress bar on the terminal while they are worked through."""
    return track(jobs, doing, console=show.progress_console(), transient=True,
                 refresh_per_second=1)  # it would disturb what is measured


def print_collectives(rows: list[Any]) -> None:
    """Print a table a collective, in nccl-tests' units; then the mean ratios."""
    by_collective, ratios = defaultdict(list), defaultdict(list)
    for row in rows:
        by_collective[row.collective].append(row)
        if row.ratio is not None and row.algorithm != "torch":
            ratios[f"{row.collective} {row.algorithm}"].append(row.ratio)
    for name, group in by_collective.items():
        first = group[0]
        show.table(
            f"{name}, {first.dtype}, {first.ranks} processes here: measured, median of "
            f"{first.repeats}",
            ("algorithm", "size(B)", "count", "time(us)", "min", "max", "algbw", "busbw",
             "/torch"),
            [(r.algorithm, r.nbytes, r.elements, *times_of(r, 1e6), gigabytes(r.algorithm_Bps),
              gigabytes(r.bus_Bps), "" if r.ratio is None else f"{r.ratio:.2f}")
             for r in group])
        typer.echo()
    means = ", ".join(f"{name} {math.exp(sum(map(math.log, r)) / len(r)):.2f}"
                      for name, r in ratios.items())
    typer.echo("algbw, busbw in GB/s, as in nccl-tests; /torch: time over that of "
               "torch.distributed,\nbelow 1 is faster than torch.")
    if means:
        typer.echo(f"Geometric mean of /torch over the sizes: {means}.")


def times_of(row: Any, per_s: float) -> list[str]:
    """Median, least and most time of a row, in a unit of which a second has `per_s`."""
    return [f"{seconds * per_s:.0f}" for seconds in (row.time_s, row.fastest_s, row.slowest_s)]


def gigabytes(rate_Bps: float | None) -> str:
    return "" if rate_Bps is None else f"{rate_Bps / 1e9:.3f}"


@app.command()
@with_exit_codes
def launch(ranks: Ranks = 4, repeats: Repeats = 5, plot: Plot = None, as_json: AsJson = False
           ) -> None:
    """Time starting ranks: dtlab.run beside torch's spawn and Accelerate's launcher.

    Each starts processes that join one Gloo group and return.
    """
    from dtlab.bench import measure_launch

    show.check_picture(plot)
    rows = measure_launch(ranks, repeats, lambda turns: watched(turns, "taking turns"))
    if plot:
        from dtlab.cli.bench_plot import starts

        starts(rows).savefig(plot)
    if as_json:
        show.json_out([row._asdict() for row in rows])
        return
    show.table(
        f"Starting {ranks} processes that form a Gloo group and end (measured, medians)",
        ("launcher", "time(ms)", "min", "max", "repeats", "/dtlab.run"),
        [(r.launcher, f"{r.time_s * 1e3:.1f}", *times_of(r, 1e3)[1:], r.repeats, f"{r.ratio:.2f}")
         for r in rows])


@app.command()
@with_exit_codes
def ps(sizes: Sizes = "4kB,1MB,16MB,64MB", repeats: Repeats = 9, as_json: AsJson = False) -> None:
    """Time a push and a pull: our parameter server beside torch's RPC and bare Gloo.

    One worker and one server, taking turns in one run; over RPC the server makes the same update.
    """
    from dtlab.bench import measure_ps

    lengths = [bytes_of(size) for size in sizes.split(",")]
    rows = [row for nbytes in watched(lengths, "measuring") for row in measure_ps(nbytes, repeats)]
    if as_json:
        show.json_out([row._asdict() for row in rows])
    else:
        show.table(
            "A push and a pull between two processes here (measured, medians)",
            ("contestant", "size(B)", "time(us)", "min", "max", "GB/s", "/dtlab.ps"),
            [(r.contestant, r.nbytes, *times_of(r, 1e6), gigabytes(r.rate_Bps), f"{r.ratio:.2f}")
             for r in rows])


@app.command()
@with_exit_codes
def parallel(
    ranks: Annotated[str, typer.Option(
        "--ranks", "-p", help="Numbers of processes, with commas.")] = "2,4",
    repeats: Repeats = 7,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Time a training step of a small GPT: data parallelism and ZeRO beside torch's own.

    All train the same model on the same text, taking turns in one run; peak memory is that of a
    rank's tensors, by the same meter.
    """
    from dtlab.bench import measure_parallel

    show.check_picture(plot)
    if not all(number.strip().isdigit() for number in ranks.split(",")):
        raise ConfigError(f"--ranks takes numbers such as 2,4, not {ranks!r}")
    rows = [row for number in watched([int(n) for n in ranks.split(",")], "measuring")
            for row in measure_parallel(number, repeats)]
    if plot:
        from dtlab.cli.bench_plot import steps

        steps(rows).savefig(plot)
    if as_json:
        show.json_out([row._asdict() for row in rows])
        return
    show.table(
        f"A step of a GPT of {rows[0].parameters:,} parameters here (measured, medians of "
        f"{repeats})",
        ("contestant", "ranks", "time(ms)", "min", "max", "/torch", "peak(MB)", "/torch"),
        [(r.contestant, r.ranks, *times_of(r, 1e3), f"{r.ratio:.2f}",
          f"{r.peak_bytes / 1e6:.1f}", f"{r.peak_ratio:.2f}") for r in rows])
    typer.echo("/torch: over torch's own in the same run; below 1 is faster, or smaller.")
