"""`dtlab testbed`: a command on several hosts at once, which are made for it and removed."""

from __future__ import annotations

from typing import Annotated

import typer

from dtlab.cli import show
from dtlab.cli.errors import FAILED, with_exit_codes
from dtlab.cli.options import AsJson
from dtlab.units import bandwidth_of, seconds_of


@with_exit_codes
def on_testbed(
    command: Annotated[list[str], typer.Argument(help="What to run on every host.")],
    hosts: Annotated[int, typer.Option(help="How many hosts.")] = 2,
    racks: Annotated[int, typer.Option(help="In how many racks, evenly.")] = 1,
    bandwidth: Annotated[str, typer.Option(help="Of a host's link, each way.")] = "400Mbit/s",
    uplink: Annotated[str, typer.Option(help="Of a rack's link to the others.")] = "100Mbit/s",
    latency: Annotated[str, typer.Option(
        help="That each link adds, where the kernel has netem.")] = "0s",
    timeout: Annotated[float | None, typer.Option(help="Seconds after which it ends.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a command on several hosts that are made of this machine, and remove them.

    The hosts are network namespaces, joined by links of the bandwidth you choose. torchrun finds
    out by itself how many there are and where they meet:

    dtlab testbed --hosts 2 torchrun --nproc-per-node 2 lesson.py

    Options of dtlab testbed stand before the command. It needs Linux, iproute2, and root or a
    kernel that gives namespaces to everyone. Nothing is left, even if it is killed: hosts, links
    and processes end with it. Exit code 1 if the command fails on a host.
    """
    from dtlab.testbed import Testbed

    def tell(host: int, line: str) -> None:
        typer.echo(f"[host {host}] {line}", nl=not line.endswith("\n"))

    with Testbed(hosts, racks, bandwidth_Bps=bandwidth_of(bandwidth),
                 uplink_Bps=bandwidth_of(uplink), latency_s=seconds_of(latency)) as made:
        results = made.run(command, timeout, None if as_json else tell)
    if as_json:
        show.json_out([result._asdict() for result in results])
    failed = [result for result in results if result.exit_code]
    for result in failed:
        typer.echo(f"dtlab: {command[0]} ended on host {result.host} with exit code "
                   f"{result.exit_code}", err=True)
    if failed:
        raise typer.Exit(FAILED)
