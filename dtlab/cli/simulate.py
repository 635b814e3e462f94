"""`dtlab simulate`: what a collective costs on a cluster that you don't have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import dtlab
from dtlab.bench.calls import check_known, elements, prepared
from dtlab.cli import show
from dtlab.cli.polite import politely
from dtlab.errors import ConfigError
from dtlab.units import bandwidth_of, bytes_of, seconds_of

NETWORKS: dict[str, Callable[[int, float, float], dtlab.topology.Topology]] = {
    "uniform": dtlab.topology.uniform,
}
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "float16", "bfloat16",
                                                  "int64", "int32", "uint8")}


def simulated(collective: str, algorithm: str, network: dtlab.topology.Topology, nbytes: int,
              dtype: torch.dtype, gamma: float) -> dtlab.Result:
    """One call of the collective in virtual time, without data."""

    def one_call(comm: dtlab.Comm) -> None:
        prepared(comm, collective, algorithm, nbytes, dtype, device="meta")()

    return dtlab.simulate(one_call, network=network, gamma=gamma)


def row(collective: str, algorithm: str, result: dtlab.Result, nbytes: int, dtype: torch.dtype,
        alpha: float, beta: float, gamma: float) -> dict[str, Any]:
    """What the simulation says, beside what the closed form says."""
    ranks, size = result.ranks, dtype.itemsize
    messages, sent_bytes = [0] * ranks, [0] * ranks
    for message in result.trace.transfers:
        messages[message.src] += 1
        sent_bytes[message.src] += message.nbytes
    closed_s = dtlab.cost.time_s(collective, algorithm, ranks, nbytes, alpha, beta, gamma, size)
    return {
        "collective": collective, "algorithm": algorithm, "ranks": ranks, "bytes": nbytes,
        "dtype": str(dtype).removeprefix("torch."),
        "simulated_s": result.elapsed_s, "closed_form_s": closed_s,
        "rounds": dtlab.cost.rounds(collective, algorithm, ranks, nbytes, size),
        "messages_by_rank": messages, "sent_bytes_by_rank": sent_bytes,
    }


def print_rows(rows: list[dict[str, Any]], title: str) -> None:
    from dtlab.plots.units import bytes_text, seconds_text

    def span(values: list[int], text: Callable[[float], str]) -> str:
        low, high = min(values), max(values)
        return text(low) if low == high else f"{text(low)} to {text(high)}"

    columns = ("algorithm", "virtual time", "closed form", "rounds", "messages a rank",
               "bytes sent a rank")
    show.table(title, columns, [
        (r["algorithm"], seconds_text(r["simulated_s"]), seconds_text(r["closed_form_s"]),
         f"{r['rounds']:g}", span(r["messages_by_rank"], "{:,}".format),
         span(r["sent_bytes_by_rank"], bytes_text))
        for r in rows
    ])


@politely
def simulate(
    collective: Annotated[
        str, typer.Argument(help=f"One of: {', '.join(dtlab.collectives.ALGORITHMS)}.")
    ],
    algorithm: Annotated[
        str | None, typer.Option("--algorithm", "-a", help="Which; without it, each of them.")
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-p", help="How many processes.")] = 8,
    nbytes: Annotated[
        str, typer.Option("--bytes", "-n", help="Size of the vector: 100MB (10⁶), 64KiB (2¹⁰).")
    ] = "100MB",
    latency: Annotated[str, typer.Option(help="α, time per message: 5us, 0.3ms.")] = "5us",
    bandwidth: Annotated[
        str, typer.Option(help="1/β of each port and direction: 10GB/s, or 80Gb/s in bits.")
    ] = "10GB/s",
    gamma: Annotated[
        str, typer.Option(help="γ, time to reduce one byte: 0.1ns.")
    ] = "0s",
    dtype: Annotated[str, typer.Option(help=f"One of: {', '.join(DTYPES)}.")] = "float32",
    network: Annotated[str, typer.Option(help=f"One of: {', '.join(NETWORKS)}.")] = "uniform",
    plot: Annotated[
        Path | None, typer.Option(help="Write the timeline there (PNG, SVG, PDF); needs -a.")
    ] = None,
    chrome: Annotated[
        Path | None, typer.Option(help="Write the trace there, for Perfetto; needs -a.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Run a collective on a simulated cluster, in virtual time, beside its closed form.

    Values are not computed, so 1,000 ranks of 1 GB each are no problem. Example:

    dtlab simulate all_reduce -a ring --ranks 8 --bytes 100MB --latency 5us --bandwidth 10GB/s
    """
    check_known(collective, algorithm)
    if network not in NETWORKS:
        raise ConfigError(f"there is no network {network!r}; choose one of: {', '.join(NETWORKS)}")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not known here; choose one of: {', '.join(DTYPES)}")
    if (plot or chrome) and algorithm is None:
        raise ConfigError("--plot and --chrome draw one run: name it with --algorithm")
    show.check_picture(plot)
    if ranks > 4096:
        raise ConfigError(f"{ranks} ranks take too long here; 4096 are the most")
    size, alpha, gamma_s = bytes_of(nbytes), seconds_of(latency), seconds_of(gamma)
    cluster = NETWORKS[network](ranks, alpha, bandwidth_of(bandwidth))
    elements(collective, ranks, size, DTYPES[dtype])
    rows = []
    for name in [algorithm] if algorithm else dtlab.collectives.ALGORITHMS[collective]:
        result = simulated(collective, name, cluster, size, DTYPES[dtype], gamma_s)
        rows.append(row(collective, name, result, size, DTYPES[dtype], alpha,
                        1 / bandwidth_of(bandwidth), gamma_s))
        if plot:
            title = f"{collective}, {name}, {ranks} ranks, {nbytes}"
            dtlab.plots.timeline(result.trace, title).savefig(plot)
        if chrome:
            result.trace.to_chrome(chrome)
    if as_json:
        show.json_out(rows)
    else:
        print_rows(rows, f"{collective} of {nbytes} {dtype} on {cluster.name}")
