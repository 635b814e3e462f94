"""The shards that ranks hold along a tensor-parallel layer, and the collectives between them."""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from dtlab.errors import ConfigError
from dtlab.parallel.types import GRADIENT, WORDS
from dtlab.plots.palette import FAINT, INK, QUIET, rank_color
from dtlab.plots.picture import Picture, page
from dtlab.units import bytes_text

WIDTH_IN = 11.0


class Held(NamedTuple):
    """A tensor: its name, its type forward, and which part of it a rank holds: "all", "rows" or
    "columns"."""

    name: str
    letter: str
    part: str


class Move(NamedTuple):
    """The step from one tensor to the next. forward, backward: the collective, "" if none."""

    name: str
    forward: str = ""
    backward: str = ""


COPY = Move("copy_to", "", "all-reduce")
REDUCE = Move("reduce_from", "all-reduce", "")
GATHER = Move("gather_from", "all-gather", "reduce-scatter")
SCATTER = Move("reduce_scatter_to", "reduce-scatter", "all-gather")
X, Y = Held("x", "I", "all"), Held("y", "I", "all")
ENTERED, PARTIAL = Held("x", "R", "all"), Held("y", "P", "all")
_MLP: list[Held | Move] = [
    ENTERED, Move("× up, its rows cut"), Held("h", "V", "columns"),
    Move("× down, its columns cut"), PARTIAL]
LAYERS: dict[str, list[Held | Move]] = {
    "column linear": [X, COPY, ENTERED, Move("× W, its rows cut"), Held("y", "V", "columns")],
    "row linear": [Held("x", "V", "columns"), Move("× W, its columns cut"), PARTIAL, REDUCE, Y],
    "MLP": [X, COPY, *_MLP, REDUCE, Y],
    "MLP, sequence parallel": [Held("x", "V", "rows"), GATHER, *_MLP, SCATTER,
                               Held("y", "V", "rows")],
    "attention": [X, COPY, ENTERED, Move("× qkv, cut by heads"), Held("q, k, v", "V", "columns"),
                  Move("heads attend"), Held("heads", "V", "columns"),
                  Move("× out, its columns cut"), PARTIAL, REDUCE, Y],
    "vocabulary embedding": [Held("tokens", "R", "all"), Move("own rows, else 0"), PARTIAL, REDUCE,
                             Y],
}


def sharded_matrix(layer: str, ranks: int, backward: bool = False, tokens: int = 2048,
                   hidden: int = 4096, itemsize: int = 2, room: int = 0) -> Picture:
    """A row for each rank, a column for each tensor of a layer of `LAYERS`: the frame is the whole
    tensor, filled is what the rank holds, hatched what is only a part of a sum. Below, the tensor's
    type (backward: its gradient's); between, what moves, in bytes that each rank sends with rings.

    room: for at least this many ranks. Raises `ConfigError` for an unknown layer, or numbers
    below 1.
    """
    if layer not in LAYERS or min(ranks, tokens, hidden) < 1:
        raise ConfigError(f"sharded_matrix: choose one of {', '.join(LAYERS)}, and ranks, tokens "
                          f"and hidden of at least 1")
    whole = tokens * hidden * itemsize * (ranks - 1) / ranks
    heading = f"{layer}, {ranks} ranks, {'backward' if backward else 'forward'} (predicted)"
    chain = LAYERS[layer]
    sent = [_sent(item, backward, whole) for item in chain]
    note = f"each rank sends {bytes_text(round(sum(sent)))} for {tokens:,} tokens of {hidden:,}"
    words = []
    with page(WIDTH_IN, 1.95 + 0.62 * max(ranks, room), heading, note) as picture:
        axes = picture.place(left=0.75, right=0.15, bottom=0.1, top=1.0)
        axes.axis("off")
        for place, item in enumerate(chain):
            if isinstance(item, Held):
                letter = GRADIENT[item.letter] if backward else item.letter
                _draw_tensor(axes, place, item, letter, ranks, backward)
                words.append(f"{'gradient of ' * backward}{item.name} {WORDS[letter]}")
                continue
            collective = item.backward if backward else item.forward
            _draw_move(axes, place, item, collective, sent[place], ranks, backward)
            words.append(f"{item.name}: {collective or 'nothing moves'}")
        for rank in range(ranks):
            axes.text(-0.62, rank, f"rank {rank}", ha="right", va="center", size=11, color=INK)
        axes.set_xlim(-0.6, len(chain) - 0.4)
        axes.set_ylim(max(ranks, room) + 0.75, -0.6)
    order = words[::-1] if backward else words
    picture.alt = f"{heading}: {note}. {'; '.join(order)}."
    return picture


def _sent(item: Held | Move, backward: bool, whole: float) -> float:
    """Return the bytes that a rank sends, if one pass of a ring sends `whole`."""
    collective = "" if isinstance(item, Held) else item.backward if backward else item.forward
    return whole * {"": 0, "all-reduce": 2}.get(collective, 1)


def _draw_tensor(axes: Axes, place: int, item: Held, letter: str, ranks: int, backward: bool
                 ) -> None:
    width, height = 0.62, 0.72
    for rank in range(ranks):
        left, top = place - width / 2, rank - height / 2
        axes.add_patch(Rectangle((left, top), width, height, facecolor=FAINT, edgecolor=QUIET,
                                 linewidth=0.8))
        x, y, w, h = left, top, width, height
        if item.part == "columns":
            x, w = left + rank * width / ranks, width / ranks
        elif item.part == "rows":
            y, h = top + rank * height / ranks, height / ranks
        partial = letter == "P"
        axes.add_patch(Rectangle((x, y), w, h, facecolor="none" if partial else rank_color(rank),
                                 edgecolor=rank_color(rank), linewidth=1.2,
                                 hatch="////" if partial else None))
    name = f"∂{item.name}" if backward else item.name
    axes.text(place, ranks - 0.25, name, ha="center", va="center", size=11.5, color=INK)
    axes.text(place, ranks + 0.18, f"{letter}", ha="center", va="center", size=15, color=INK,
              weight="bold")
    axes.text(place, ranks + 0.55, WORDS[letter], ha="center", va="center", size=9, color=QUIET)


def _draw_move(axes: Axes, place: int, item: Move, collective: str, nbytes: float, ranks: int,
               backward: bool) -> None:
    ends = (place - 0.36, place + 0.36)
    middle = (ranks - 1) / 2
    axes.annotate("", (ends[0 if backward else 1], middle), (ends[1 if backward else 0], middle),
                  arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 2.4 if collective
                              else 1.0})
    first, _, second = item.name.partition(", ")
    axes.text(place, middle - 0.28, first, ha="center", va="bottom", size=9, color=INK)
    if second:
        axes.text(place, middle + 0.12, second, ha="center", va="top", size=8.5, color=QUIET)
    if collective:
        axes.text(place, middle + 0.12, f"{collective}\n{bytes_text(round(nbytes))}", ha="center",
                  va="top", size=9, color=INK)
