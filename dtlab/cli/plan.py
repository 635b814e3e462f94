"""`dtlab plan`: layouts of a model on a cluster, the fastest first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtlab.checks import check_choice, check_whole
from dtlab.cli import show
from dtlab.cli.errors import with_exit_codes
from dtlab.cli.options import AsJson

if TYPE_CHECKING:  # what it needs takes a second to import
    from dtlab.models import Shape
    from dtlab.parallel import Plan


def named_shape(name: str) -> Shape:
    """The shape of "llama3-70b": a name of `dtlab.models.SHAPES`, in any spelling."""
    from dtlab.models import SHAPES

    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    known = {plain(each): each for each in SHAPES}
    if plain(name) not in known:
        check_choice("model", name, SHAPES)
    return SHAPES[known[plain(name)]]


def values_of(plan: Plan, tokens: int) -> dict[str, object]:
    """Return the table's values of a plan, and more, for JSON."""
    return {
        "layout": plan.layout._asdict(),
        "step_s": plan.step_s if not plan.why_not else None,
        "tokens_per_s": tokens / plan.step_s if not plan.why_not else None,
        "utilization": plan.efficiency if not plan.why_not else None,
        "why_not": plan.why_not or None,
        "terms_s": plan.terms, "memory_bytes": plan.memory,
    }


@with_exit_codes
def plan(
    model: Annotated[str, typer.Option(help="Such as llama3-70b or gpt-3.")],
    cluster: Annotated[str, typer.Option(help="Device, servers × devices, such as h100:8x8.")],
    batch: Annotated[int, typer.Option(help="Samples of a step.")],
    positions: Annotated[int | None, typer.Option(help="Context; by default the model's.")] = None,
    precision: Annotated[str, typer.Option(help="Such as bf16 or fp8.")] = "bf16",
    software: Annotated[str, typer.Option(
        help="What it gets of the devices: eager, compiled or megatron-2021.")] = "eager",
    headroom: Annotated[float, typer.Option(help="Share of the memory to leave free.")] = 0.08,
    top: Annotated[int, typer.Option(help="How many to show.", min=1)] = 10,
    plot: Annotated[Path | None, typer.Option(help="Draw them to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Layouts of a model on a cluster, the fastest first, and the nearest of those that don't fit.

    Layouts within the planner's error of the fastest are marked with ≈: they can't be told apart.
    """
    from dtlab.parallel import planner
    from dtlab.units import bytes_text, seconds_text

    show.check_picture(plot)
    shape = named_shape(model)
    if positions is not None:
        check_whole("positions", positions)
        shape = shape._replace(positions=positions)
    device, topology = planner.cluster(cluster)
    check_choice("software", software, planner.SOFTWARE)
    plans = planner.plan(shape, topology, batch, device=device, precision=precision,
                         software=planner.SOFTWARE[software], headroom=headroom)
    fit = [found for found in plans if not found.why_not]
    shown, missed = fit[:top], plans[len(fit) : len(fit) + 3]
    tokens, close = batch * shape.positions, planner.ties(plans)
    if as_json:
        show.json_out({"layouts": len(plans), "fit": len(fit), "ties": len(close),
                       "plans": [values_of(found, tokens) for found in shown],
                       "nearest_misses": [values_of(found, tokens) for found in missed]})
    else:
        show.table(
            f"{model} on {cluster}: {len(plans):,} layouts, {len(fit):,} fit",
            ("layout", "step", "tokens/s a device", "memory", "utilization", ""),
            [(str(found.layout), seconds_text(found.step_s),
              f"{tokens / found.step_s / topology.ranks:,.0f}", bytes_text(found.memory_bytes),
              f"{found.efficiency:.0%}", "≈" if found in close else "") for found in shown])
        typer.echo(f"≈ within {planner.TIE:.0%} of the fastest, which is the error of a prediction:"
                   f" {len(close)} layouts.")
        for found in missed:
            typer.echo(f"Doesn't fit: {found}")
    if plot:
        from dtlab.plots.plans import plans as draw

        draw(shown[:8], f"{model} on {cluster}", f"{batch} samples a step").savefig(plot)
