"""`dtlab train`: the course's GPT on a mesh of processes, with any mix of parallelism."""

from __future__ import annotations

import contextlib
import io
import math
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import dtlab
from dtlab.cli import show
from dtlab.cli.errors import speaks, with_exit_codes
from dtlab.cli.options import AsJson, Backend, Device
from dtlab.cli.train_job import (
    DTYPES,
    LINE,
    SCHEDULES,
    Trained,
    TrainJob,
    axes_of,
    check,
    first_step,
    mesh_text,
    train_rank,
)
from dtlab.models import GPTConfig
from dtlab.parallel.checkpoint_files import INDEX, check_replaceable
from dtlab.units import bytes_text, count_text, seconds_text


def check_paths(plot: Path | None, trace: Path | None, folder: Path | None) -> None:
    """Raise `ConfigError` or `OSError` now, not after the work, if one can't be written."""
    show.check_picture(plot)
    if trace:
        show.check_writable(trace)
    if folder:
        check_replaceable(folder)
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        show.check_writable(folder / INDEX if folder.exists() else folder)


class LossReader(io.TextIOBase):
    """Standard output while the ranks train: moves a progress bar to what rank 0 prints."""

    def __init__(self, bar: Progress, steps: int):
        self.bar, self.task = bar, bar.add_task("training", total=steps, loss="")

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if told := re.fullmatch(r"(?:\[rank 0\] )?" + LINE.format(r"(\d+)", r"(\S+)"), line):
                self.bar.update(self.task, completed=int(told[1]), loss=f"loss {told[2]}")
            elif line.strip():  # a warning of torch, say
                sys.stderr.write(line + "\n")
        return len(text)


@contextlib.contextmanager
def progress(steps: int) -> Iterator[None]:
    """Show, inside, a progress bar with the loss, if a person watches."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TextColumn("{task.fields[loss]}"), TimeRemainingColumn())
    with (Progress(*columns, console=show.progress_console(), transient=True) as bar,
          contextlib.redirect_stdout(LossReader(bar, steps))):
        yield


def report(job: TrainJob, result: dtlab.Result) -> dict[str, Any]:
    """The run in numbers. A loss that is no number is None."""
    done: list[Trained] = result.values
    step_s = statistics.median(done[0].seconds[:-1] or done[0].seconds)  # the last one was metered
    return {
        "mesh": job.axes, "zero": job.zero, "schedule": job.schedule,
        "micro_batches": job.micro_batches, "sequence": job.sequence, "recompute": job.recompute,
        **job.model, "batch": job.batch, "lr": job.lr, "seed": job.seed, "first_step": job.first,
        "losses": [loss if math.isfinite(loss) else None for loss in done[0].losses],
        "step_s": step_s, "tokens_per_s": job.batch * job.config.context / step_s,
        "peak_bytes_by_rank": [one.peak_bytes for one in done],
    }


def summary(found: dict[str, Any]) -> str:
    losses = [math.nan if loss is None else loss for loss in found["losses"]]
    return (f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {count_text(len(losses), 'step')} of "
            f"{seconds_text(found['step_s'])}; {found['tokens_per_s']:,.0f} tokens/s; a rank's "
            f"tensors took at most {bytes_text(max(found['peak_bytes_by_rank']))}")


def draw(job: TrainJob, losses: list[float | None], path: Path) -> None:
    """Draw the loss curve."""
    from matplotlib.ticker import MaxNLocator

    from dtlab.plots.palette import line_style
    from dtlab.plots.picture import page

    values = [math.nan if loss is None else loss for loss in losses]
    with page(11, 5.8, f"Training a GPT on {mesh_text(job.axes)} (measured)",
                    f"{job.batch} samples of {job.config.context} tokens a step; ZeRO {job.zero}; "
                    f"{job.dtype}") as picture:
        axes = picture.place(left=1.15, right=0.4, bottom=0.9, top=1.0)
        axes.plot(range(job.first, job.first + job.steps), values, color=line_style(0).color,
                  marker="o" if job.steps == 1 else "")
        axes.set(xlabel="step", ylabel="loss (nats)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(True, axis="y")
    picture.savefig(path)


@with_exit_codes
def train(
    mesh: Annotated[str, typer.Option(
        help="Axes and their sizes: pp (pipeline), dp (data), tp (tensor).")] = "dp=2",
    zero: Annotated[int, typer.Option(help="Stage of ZeRO along dp: 0 to 3.")] = 0,
    schedule: Annotated[str, typer.Option(
        help=f"Of the pipeline: {', '.join(SCHEDULES)}.")] = "one_f_one_b",
    micro_batches: Annotated[int | None, typer.Option(
        help="Parts of a dp rank's samples. (Default: pp.)")] = None,
    sequence: Annotated[bool, typer.Option(
        "--sequence", help="Sequence parallelism along tp.")] = False,
    recompute: Annotated[bool, typer.Option(
        "--recompute", help="Compute activations again, don't keep them.")] = False,
    steps: Annotated[int, typer.Option(help="How many steps.")] = 50,
    batch: Annotated[int, typer.Option(help="Samples a step, of all ranks together.")] = 16,
    layers: Annotated[int, typer.Option(help="Layers of the GPT.")] = 4,
    hidden: Annotated[int, typer.Option(help="Its width.")] = 128,
    heads: Annotated[int, typer.Option(help="Its attention heads.")] = 4,
    context: Annotated[int, typer.Option(help="Tokens of a sample.")] = 64,
    dtype: Annotated[str, typer.Option(help=f"One of: {', '.join(DTYPES)}.")] = "float32",
    lr: Annotated[float, typer.Option(help="Step size of AdamW.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of the initial parameters and the batches.")] = 0,
    device: Device = "cpu",
    backend: Backend = "gloo",
    load_from: Annotated[Path | None, typer.Option(
        "--load", help="Go on from this checkpoint, of any mesh.")] = None,
    save_to: Annotated[Path | None, typer.Option(
        "--save", help="Write a checkpoint to this folder at the end.")] = None,
    plot: Annotated[Path | None, typer.Option(
        help="Draw the loss curve there (PNG, SVG, PDF).")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace there, for Perfetto.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a small GPT on processes of this machine, with any mix of parallelism.

    The loss is the same on every mesh, up to rounding:

    dtlab train --mesh pp=2,dp=2,tp=2 --zero 1 --plot loss.png

    On several machines, torchrun starts the ranks, and rank 0 prints:

    torchrun --nproc-per-node 8 -m dtlab train --mesh pp=2,dp=2,tp=2 --zero 1
    """
    axes = axes_of(mesh)
    micro_batches = axes.get("pp", 1) if micro_batches is None else micro_batches
    config = GPTConfig(layers=layers, hidden=hidden, heads=heads, context=context)
    job = TrainJob(axes, config, dtype, zero, schedule, micro_batches, sequence, recompute, steps,
              batch, lr, seed, load_from, save_to)
    check(job)
    if load_from:
        job = replace(job, first=first_step(job, load_from))
    if speaks():
        check_paths(plot, trace, save_to)
    with progress(steps):
        result = dtlab.run(train_rank, job, ranks=math.prod(axes.values()), timeout=None,
                           trace=trace is not None, device=device, backend=backend)
    if not speaks():
        return
    found = report(job, result)
    if plot:
        draw(job, found["losses"], plot)
    if trace:
        result.trace.to_chrome(trace)
    if as_json:
        show.json_out(found)
    else:
        typer.echo(summary(found))
