"""`dtlab simulate`: what a collective costs on a cluster that you don't have."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import dtlab
from dtlab.bench.calls import elements, prepared
from dtlab.checks import check_choice
from dtlab.cli import show
from dtlab.cli.errors import with_exit_codes
from dtlab.cli.options import AsJson
from dtlab.collectives.registry import check_algorithm
from dtlab.errors import ConfigError
from dtlab.topology.names import BUILDERS
from dtlab.units import bandwidth_of, bytes_of, bytes_text, seconds_of, seconds_text
from dtlab.wires import options_for

AlphaBeta = tuple[float, float]  # α in seconds, β in seconds per byte
Options = dict[str, Any]  # of an algorithm
MOST_RANKS = 4096
MOST_BYTES = 10**12  # what is cut into segments of a fixed size would take hours
SAME = 0.01  # what is slower by no more than this share counts as fastest, too
NAMES = ", ".join(BUILDERS)
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "float16", "bfloat16",
                                                  "int64", "int32", "uint8")}


def simulated(collective: str, algorithm: str, network: dtlab.topology.Topology, nbytes: int,
              dtype: torch.dtype, gamma: float, options: Options) -> dtlab.Result:
    """One call of the collective in virtual time, without data."""

    def one_call(comm: dtlab.Comm) -> None:
        prepared(comm, collective, algorithm, nbytes, dtype, device="meta", **options)()

    return dtlab.simulate(one_call, network=network, gamma=gamma)


def cluster_of(name: str, ranks: int | None, latency: str | None,
               bandwidth: str | None) -> tuple[dtlab.topology.Topology, AlphaBeta | None]:
    """The cluster that the options describe; for a uniform one, also its α and β."""
    if name == "uniform":
        alpha, bandwidth_Bps = seconds_of(latency or "5us"), bandwidth_of(bandwidth or "10GB/s")
        ranks = 8 if ranks is None else ranks
        if ranks > MOST_RANKS:
            raise ConfigError(f"{ranks} ranks take too long here; {MOST_RANKS} are the most")
        cluster = dtlab.topology.uniform(ranks, alpha, bandwidth_Bps)
        return cluster, (alpha, 1 / bandwidth_Bps)
    for option, value in (("ranks", ranks), ("latency", latency), ("bandwidth", bandwidth)):
        if value is not None:
            raise ConfigError(f"--{option} is for --topology uniform; {name} says by itself what "
                              f"it is made of")
    cluster = dtlab.topology.named(name)
    if cluster.ranks > MOST_RANKS:
        raise ConfigError(f"{cluster.ranks} ranks take too long here; {MOST_RANKS} are the most")
    return cluster, None


def row(collective: str, algorithm: str, result: dtlab.Result, nbytes: int, dtype: torch.dtype,
        machine: AlphaBeta | None, gamma: float, options: Options) -> dict[str, Any]:
    """Return the simulation's results, beside those of the closed form for a uniform cluster, where
    no algorithm has options."""
    ranks, size = result.ranks, dtype.itemsize
    messages, sent_bytes = [0] * ranks, [0] * ranks
    for message in result.trace.transfers:
        messages[message.src] += 1
        sent_bytes[message.src] += message.nbytes
    closed_s = None if machine is None else dtlab.cost.time_s(
        collective, algorithm, ranks, nbytes, *machine, gamma, size)
    form, rounds = dtlab.cost.form(collective, algorithm, ranks, nbytes, size), None
    if options:  # no closed form: how many messages follow each other if each takes a second
        by_seconds = dtlab.topology.uniform(ranks, 1.0, math.inf)
        rounds = simulated(collective, algorithm, by_seconds, nbytes, dtype, 0.0, options).elapsed_s
    return {
        "collective": collective, "algorithm": algorithm, "ranks": ranks, "bytes": nbytes,
        "dtype": str(dtype).removeprefix("torch."), "options": options,
        "simulated_s": result.elapsed_s, "closed_form_s": closed_s,
        "closed_form_is_exact": form.exact, "rounds": form.rounds if rounds is None else rounds,
        "messages_by_rank": messages, "sent_bytes_by_rank": sent_bytes,
    }


def print_rows(rows: list[dict[str, Any]], title: str) -> None:
    def span(values: list[int], text: Callable[[float], str]) -> str:
        low, high = min(values), max(values)
        first, unit = text(low), text(high).partition(" ")[2]
        if first == text(high):
            return first
        return f"{first.removesuffix(f' {unit}') if unit else first}–{text(high)}"

    star = "★ " if len(rows) > 1 else ""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "algorithm": lambda r: r["algorithm"],
        "simulated": lambda r: star * r["fastest"] + seconds_text(r["simulated_s"]),
        "closed form": lambda r: ("" if r["closed_form_is_exact"] else "≤ ")
            + seconds_text(r["closed_form_s"]),
        "rounds": lambda r: f"{r['rounds']:g}",
        "messages": lambda r: span(r["messages_by_rank"], "{:,}".format),
        "bytes sent": lambda r: span(r["sent_bytes_by_rank"], bytes_text),
    }
    if any(r["closed_form_s"] is None for r in rows):
        del columns["closed form"]
    ranked = sorted(rows, key=lambda r: r["simulated_s"])
    show.table(title, list(columns), [[text(r) for text in columns.values()] for r in ranked])
    typer.echo("Messages and bytes: what one rank sends.")
    if star:
        typer.echo(f"{star}fastest, and all within {SAME:.0%} of it.")
    fitted = ", ".join(f"{r['algorithm']} ({_text(r['options'])})" for r in ranked if r["options"])
    if fitted:
        typer.echo(f"Fitted to this cluster: {fitted}.")


def _text(options: Options) -> str:
    return ", ".join(f"{name}={f'{len(value)} rings' if name == 'cycles' else value}"
                     for name, value in options.items())


@with_exit_codes
def simulate(
    collective: Annotated[str, typer.Argument(
        help=f"One of: {', '.join(dtlab.collectives.ALGORITHMS)}.")],
    algorithm: Annotated[str | None, typer.Option(
        "--algorithm", "-a", help="Which; without it, each of them.")] = None,
    topology: Annotated[str, typer.Option(
        "--topology", "-t", "--network", help=f"A file, or NAME:SIZES: {NAMES}.")] = "uniform",
    ranks: Annotated[int | None, typer.Option(
        "--ranks", "-p", help="uniform: how many processes. (Default: 8.)")] = None,
    nbytes: Annotated[str, typer.Option(
        "--bytes", "-n", help="Size of the vector: 100MB (10⁶), 64KiB (2¹⁰).")] = "100MB",
    latency: Annotated[str | None, typer.Option(
        help="uniform: α, time per message: 5us, 0.3ms. (Default: 5us.)")] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(help="uniform: 1/β of each port and direction: 10GB/s, or 80Gb/s in bits. "
                          "(Default: 10GB/s.)"),
    ] = None,
    gamma: Annotated[str, typer.Option(
        help="γ, time to reduce one byte: 0.1ns.")] = "0s",
    dtype: Annotated[str, typer.Option(help=f"One of: {', '.join(DTYPES)}.")] = "float32",
    plot: Annotated[Path | None, typer.Option(
        help="Write the timeline there (PNG, SVG, PDF); needs -a.")] = None,
    chrome: Annotated[Path | None, typer.Option(
        help="Write the trace there, for Perfetto; needs -a.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a collective on a simulated cluster, in virtual time, beside its closed form.

    The fastest comes first. Values are not computed, so 1,000 ranks of 1 GB each are no problem:

    dtlab simulate all_reduce -a ring --ranks 8 --bytes 100MB --latency 5us --bandwidth 10GB/s

    A cluster of another shape is named with its sizes (torus:4x4, racks:4x8,oversubscription=2),
    composed of servers and a network (nvswitch:8@racks:4x8), or read from a file:

    dtlab simulate all_reduce -a ring --topology racks:4x8 --plot ring.png
    """
    check_choice("collective", collective, dtlab.collectives.ALGORITHMS)
    if algorithm is not None:
        check_algorithm(collective, algorithm, auto=False)
    check_choice("dtype", dtype, DTYPES)
    if (plot or chrome) and algorithm is None:
        raise ConfigError("--plot and --chrome draw one run: name it with --algorithm")
    show.check_picture(plot)
    if chrome:
        show.check_writable(chrome)
    size, gamma_s = bytes_of(nbytes), seconds_of(gamma)
    cluster, machine = cluster_of(topology, ranks, latency, bandwidth)
    if collective == "barrier":
        size = 0
    if size > MOST_BYTES:
        raise ConfigError(f"-n {nbytes}: a simulation here takes 1 TB at most")
    elements(collective, cluster.ranks, size, DTYPES[dtype])
    fitted = options_for(cluster) if collective == "all_reduce" and machine is None else {}
    rows = []
    for name in [algorithm] if algorithm else dtlab.collectives.ALGORITHMS[collective]:
        options = fitted.get(name, {})
        result = simulated(collective, name, cluster, size, DTYPES[dtype], gamma_s, options)
        rows.append(row(collective, name, result, size, DTYPES[dtype], machine, gamma_s, options))
        if plot:
            title = f"{collective}, {name}, {cluster.ranks} ranks, {nbytes}"
            dtlab.plots.timeline(result.trace, title).savefig(plot)
        if chrome:
            result.trace.to_chrome(chrome)
    least_s = min(each["simulated_s"] for each in rows)
    for each in rows:
        each["fastest"] = each["simulated_s"] <= least_s * (1 + SAME)
    if as_json:
        show.json_out(rows)
        return
    what = f"{collective} of {nbytes} {dtype}" if size else collective
    print_rows(rows, f"{what} on {cluster.name}")
    if machine:
        bound_s = dtlab.cost.lower_bound_s(collective, cluster.ranks, size, *machine, gamma_s)
        typer.echo(f"Where a rank sends and receives one message at a time, none takes less than "
                   f"{seconds_text(bound_s)}.")
