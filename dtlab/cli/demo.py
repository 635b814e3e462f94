"""`dtlab demo`: the whole idea in ten seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import typer
from rich.syntax import Syntax

import dtlab
from dtlab.cli import show
from dtlab.cli.errors import with_exit_codes
from dtlab.cli.options import Ranks
from dtlab.errors import ConfigError


def add_up(comm: dtlab.Comm, count: int) -> float:
    """The one function of the tour: a ring all-reduce of `count` ones times the rank."""
    x = torch.full((count,), float(comm.rank))
    with comm.compute("say hello"):
        print(f"hello, my first number is {x[0].item():g}")
    dtlab.collectives.all_reduce(comm, x, algorithm="ring")
    return x[0].item()


WRONG = """\
def pass_on(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = torch.ones(1000)
    comm.send(x, right)
    comm.recv(x, left)
"""


def learners_function(source: str, name: str) -> Callable[..., Any]:
    """Return `name` of `source`, as if a learner had it in a file: errors quote its lines."""
    names: dict[str, Any] = {"torch": torch}
    exec(compile(source, f"{name}.py", "exec"), names)
    function: Callable[..., Any] = names[name]
    return function


def headline(number: int, text: str) -> None:
    typer.secho(f"\n{number}. {text}", bold=True)


def print_trace(result: dtlab.Result) -> None:
    from dtlab.units import bytes_text

    trace = result.trace
    show.table("", ("rank", "value", "messages sent", "bytes sent", "bytes received"), [
        (rank, f"{value:g}", trace.messages(rank), bytes_text(trace.sent_bytes(rank)),
         bytes_text(trace.received_bytes(rank)))
        for rank, value in enumerate(result.values)
    ])


@with_exit_codes
def demo(ranks: Ranks = 4) -> None:
    """A tour of ten seconds: one function on processes, the same one simulated, a deadlock."""
    from dtlab.units import seconds_text

    if ranks < 2:
        raise ConfigError(f"the tour needs 2 ranks or more, which send to each other; not {ranks}")
    headline(1, f"One function on {ranks} processes; each one's prints carry its rank")
    result = dtlab.run(add_up, 1_000_000, ranks=ranks, timeout=60)

    headline(2, f"What moved: a ring all-reduce of 4 MB, in {seconds_text(result.elapsed_s)}")
    print_trace(result)

    many = 64
    headline(3, f"The same function on {many} simulated machines: 5 µs, 10 GB/s")
    network = dtlab.topology.uniform(many, 5e-6, 10e9)
    simulated = dtlab.simulate(add_up, 1_000_000, network=network, echo=False)
    closed_s = dtlab.cost.time_s("all_reduce", "ring", many, 4_000_000, 5e-6, 1 / 10e9)
    typer.echo(f"each holds {simulated.values[0]:g} after {seconds_text(simulated.elapsed_s)} of "
               f"virtual time; the closed form says {seconds_text(closed_s)}")

    headline(4, "A deadlock, named instead of a hang: all ranks send, none receives yet")
    show.console().print(Syntax(WRONG, "python", line_numbers=True, background_color="default"))
    pass_on = learners_function(WRONG, "pass_on")
    try:
        dtlab.simulate(pass_on, network=dtlab.topology.uniform(ranks, 5e-6, 10e9))
    except dtlab.Deadlock as deadlock:
        typer.echo(str(deadlock))
    typer.echo("\nGo on: `dtlab lab` opens the course, `dtlab simulate all_reduce` compares "
               "algorithms.")
