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
from dtlab.collectives import ALGORITHMS
from dtlab.errors import ConfigError
from dtlab.units import bytes_of

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Measure, beside a peer in the same run.")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the figures there (PNG, SVG, PDF).")]


@app.command()
@with_exit_codes
def collectives(
    names: Annotated[
        list[str] | None, typer.Argument(help="Which collectives; without any, all of them.")
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-p", help="How many processes.")] = 4,
    sizes: Annotated[
        str, typer.Option("--bytes", "-n", help="Sizes, with commas: 64kB (10³), 1MiB (2²⁰).")
    ] = "64KiB,1MiB,16MiB",
    algorithm: Annotated[
        str | None, typer.Option("--algorithm", "-a", help="Only this one (and torch's).")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Repetitions; the median counts.")] = 9,
    device: Annotated[str, typer.Option(help="cpu, or cuda: the ranks take GPUs in turn.")] = "cpu",
    backend: Annotated[
        str, typer.Option(help="gloo, or nccl, which takes a GPU for each rank.")] = "gloo",
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Time each algorithm and torch.distributed's own, taking turns in one run.

    As nccl-tests prints: algorithm bandwidth is bytes/time; bus bandwidth is comparable between
    rank counts.
    """
    from dtlab.bench import measure
    from dtlab.bench.calls import check_known

    show.check_picture(plot)
    wanted = names or list(ALGORITHMS)
    for name in wanted:
        check_known(name, algorithm, auto=True)
    lengths = [bytes_of(size) for size in sizes.split(",")]
    jobs = [(name, nbytes) for name in wanted
            for nbytes in (lengths if name != "barrier" else [0])]
    chosen = [algorithm] if algorithm else []
    rows = [row for name, nbytes in watched(jobs, "measuring")
            for row in measure(name, nbytes, ranks, chosen, repeats, device=device,
                               backend=backend)]
    if plot:
        draw(rows, plot)
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
            [(r.algorithm, r.nbytes, r.elements, *(f"{t * 1e6:.0f}" for t in
              (r.time_s, r.fastest_s, r.slowest_s)), gigabytes(r.algorithm_Bps),
              gigabytes(r.bus_Bps), "" if r.ratio is None else f"{r.ratio:.2f}")
             for r in group],
        )
        typer.echo()
    means = ", ".join(f"{name} {math.exp(sum(map(math.log, r)) / len(r)):.2f}"
                      for name, r in ratios.items())
    typer.echo("algbw, busbw in GB/s, as in nccl-tests; /torch: time over that of "
               "torch.distributed,\nbelow 1 is faster than torch.")
    if means:
        typer.echo(f"Geometric mean of /torch over the sizes: {means}.")


def gigabytes(rate_Bps: float | None) -> str:
    return "" if rate_Bps is None else f"{rate_Bps / 1e9:.3f}"


def draw(rows: list[Any], path: Path) -> None:
    """Draw bus bandwidth over size, a line a contestant."""
    from dtlab.cli.bench_plot import bandwidths

    if not any(row.bus_Bps for row in rows):
        raise ConfigError("there is nothing to draw: a barrier has no size; name another one")
    bandwidths(rows).savefig(path)


@app.command()
@with_exit_codes
def launch(
    ranks: Annotated[int, typer.Option("--ranks", "-p", help="How many processes.")] = 4,
    repeats: Annotated[int, typer.Option(help="Repetitions; the median counts.")] = 5,
    plot: Plot = None,
    as_json: AsJson = False,
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
    else:
        print_launch(rows)


def print_launch(rows: list[Any]) -> None:
    show.table(
        f"Starting {rows[0].ranks} processes that form a Gloo group and end (measured, medians)",
        ("launcher", "time(ms)", "min", "max", "repeats", "/dtlab.run"),
        [(r.launcher, f"{r.time_s * 1e3:.1f}",
          f"{r.fastest_s * 1e3:.0f}", f"{r.slowest_s * 1e3:.0f}", r.repeats, f"{r.ratio:.2f}")
         for r in rows],
    )


@app.command()
@with_exit_codes
def ps(
    sizes: Annotated[
        str, typer.Option("--bytes", "-n", help="Sizes, with commas: 64kB (10³), 1MiB (2²⁰).")
    ] = "4kB,1MB,16MB,64MB",
    repeats: Annotated[int, typer.Option(help="Repetitions; the median counts.")] = 9,
    as_json: AsJson = False,
) -> None:
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
            [(r.contestant, r.nbytes, *(f"{t * 1e6:.0f}" for t in
              (r.time_s, r.fastest_s, r.slowest_s)), f"{r.rate_Bps / 1e9:.3f}", f"{r.ratio:.2f}")
             for r in rows],
        )


@app.command()
@with_exit_codes
def parallel(
    ranks: Annotated[
        str, typer.Option("--ranks", "-p", help="Numbers of processes, with commas.")
    ] = "2,4",
    repeats: Annotated[int, typer.Option(help="Repetitions; the median counts.")] = 7,
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
        [(r.contestant, r.ranks, *(f"{t * 1e3:.0f}" for t in (r.time_s, r.fastest_s, r.slowest_s)),
          f"{r.ratio:.2f}", f"{r.peak_bytes / 1e6:.1f}", f"{r.peak_ratio:.2f}") for r in rows],
    )
    typer.echo("/torch: over torch's own in the same run; below 1 is faster, or smaller.")
