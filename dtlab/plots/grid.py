"""All ranks at a glance: what each returned, or is doing."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.patches import FancyBboxPatch, Rectangle

from dtlab.checks import check_positive, short
from dtlab.errors import ConfigError, RankDied, RankFailed, RunTimeout
from dtlab.plots.palette import ALARM, FAINT, INK, PAPER, QUIET, rank_style
from dtlab.plots.picture import MARGIN_IN, Picture, clock_name, fit_text, page
from dtlab.result import Result
from dtlab.units import count_text, seconds_text

WIDTH_IN = 11.0


class Status(NamedTuple):
    """The look of a state: a sign, so that colour is not needed; and its colour."""

    sign: str
    color: str


STATUSES = {
    "idle": Status("○", QUIET),
    "running": Status("▶", INK),
    "waiting": Status("◔", INK),
    "returned": Status("✓", INK),
    "stopped": Status("■", QUIET),
    "failed": Status("✗", ALARM),
    "died": Status("✗", ALARM),
}


class Tile(NamedTuple):
    """One rank: its state (a key of STATUSES, or any short text) and a line about it."""

    status: str
    text: str = ""


def rank_grid(what: Result | BaseException | Sequence[Any] | int, *,
              statuses: Sequence[str] | None = None, title: str = "", ranks: int | None = None,
              height_in: float | None = None) -> Picture:
    """A tile a rank, with its number, its colour, its state and what it returned.

    what: a `Result`; or one value a rank; or the number of ranks, all idle; or an error of `run`
    or `simulate` (`ranks` says how many there were): who failed, or who waits for whom.
    statuses: the states, by rank ("idle", "running", "waiting", "returned", "stopped", "failed",
    "died", or a word of yours). height_in: of the picture; None: as the tiles need.
    Raises `ConfigError` if the numbers don't match.
    """
    check_positive("height_in", 1 if height_in is None else height_in)
    tiles = tiles_of(what, statuses, ranks)
    heading = title or _heading(what, len(tiles))
    columns = _columns(len(tiles))
    rows = -(-len(tiles) // columns)
    tile_w = (WIDTH_IN - 2 * MARGIN_IN) / columns
    tile_h = max(0.4, min(1.25, ((height_in or 7.65) - 1.15) / rows))
    with page(WIDTH_IN, height_in or rows * tile_h + 1.15, heading, _count(tiles)) as picture:
        axes = picture.place(left=MARGIN_IN, right=MARGIN_IN, bottom=0.15, top=1.0)
        axes.set_xlim(0, tile_w * columns)
        axes.set_ylim(picture.get_figheight() - 1.15, 0)
        axes.set_axis_off()
        for rank, tile in enumerate(tiles):
            _draw(axes, rank, tile, (rank % columns) * tile_w, (rank // columns) * tile_h,
                  tile_w, tile_h)
    note = "; ".join(f"rank {rank} {tile.status}" + (f" {tile.text}" if tile.text else "")
                     for rank, tile in enumerate(tiles[:16]))
    picture.alt = f"{heading}: {note}" + ("; …" if len(tiles) > 16 else "") + "."
    return picture


def tiles_of(what: Any, statuses: Sequence[str] | None, ranks: int | None) -> list[Tile]:
    """Return the tiles of the grid; see `rank_grid`."""
    if isinstance(what, Result):
        what = what.values
    if isinstance(what, BaseException):
        return _tiles_of_error(what, ranks)
    if isinstance(what, int):
        if what < 1:
            raise ConfigError(f"a grid needs at least one rank, not {what}")
        tiles = [Tile("idle")] * what
    elif isinstance(what, Sequence):
        tiles = [Tile("returned", short(value, 80)) for value in what]
    else:
        raise ConfigError(f"a grid shows a Result, values, an error or a number of ranks, not "
                          f"{short(what, 80)}")
    if statuses is not None:
        if len(statuses) != len(tiles):
            raise ConfigError(f"{len(statuses)} statuses for {len(tiles)} ranks; give one a rank")
        tiles = [Tile(status, tile.text) for status, tile in zip(statuses, tiles, strict=True)]
    if not tiles:
        raise ConfigError("a grid needs at least one rank")
    return tiles


def _tiles_of_error(error: BaseException, ranks: int | None) -> list[Tile]:
    if isinstance(error, RunTimeout) and error.waiting:
        rows = {row.rank: row for row in error.waiting}
        count = ranks or max(rows) + 1
        tiles = [Tile("stopped")] * count
        for rank, row in rows.items():
            sides = {"send": "to", "recv": "from"}
            partner = f"{row.doing} {sides.get(row.doing, 'with')} {row.peer}"
            tiles[rank] = Tile("waiting", partner) if row.peer else Tile(row.doing)
        return tiles
    if isinstance(error, (RankFailed, RankDied)):
        failed = error.rank
        tiles = [Tile("stopped")] * max(ranks or 0, failed + 1, 1)
        if failed >= 0:
            first = str(error).splitlines()[0].removeprefix(f"rank {failed} raised ")
            kind = "failed" if isinstance(error, RankFailed) else "died"
            tiles[failed] = Tile(kind, first)
        return tiles
    raise ConfigError(f"no ranks to show in {type(error).__name__}: {error}")


def _heading(what: Any, ranks: int) -> str:
    if isinstance(what, Result):
        clock = clock_name(what.trace.virtual)
        return f"{count_text(ranks, 'rank')}, {seconds_text(what.elapsed_s)} ({clock})"
    if isinstance(what, BaseException):
        return f"{type(what).__name__}: {count_text(ranks, 'rank')}"
    return count_text(ranks, "rank")


def _count(tiles: Sequence[Tile]) -> str:
    states = list(dict.fromkeys(tile.status for tile in tiles))
    return " · ".join(f"{sum(t.status == state for t in tiles)} {state}" for state in states)


def _columns(count: int) -> int:
    """Choose at most six rows, then as few empty places as can be, then about four tiles a row."""
    if count <= 4:
        return count

    def cost(columns: int) -> tuple[int, int, int, int]:
        rows = -(-count // columns)
        return max(0, rows - 6), rows * columns - count, abs(columns - 4), -columns

    return min((3, 4, 5, 6, 8), key=cost)


def _draw(axes: Any, rank: int, tile: Tile, x: float, y: float, w: float, h: float) -> None:
    style = rank_style(rank)
    status = STATUSES.get(tile.status, Status("", INK))
    alarm = status.color == ALARM
    chip = min(0.75, 0.32 * w, h - 0.12)
    axes.add_artist(FancyBboxPatch(
        (x + 0.05, y + 0.05), w - 0.1, h - 0.1, boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=PAPER, edgecolor=ALARM if alarm else FAINT, linewidth=3 if alarm else 1.5))
    axes.add_artist(Rectangle((x + 0.1, y + 0.1), chip, h - 0.2, facecolor=style.color,
                              hatch=style.hatch, edgecolor=style.ink, linewidth=0))
    number = axes.text(
        x + 0.1 + chip / 2, y + h / 2, str(rank), ha="center", va="center_baseline",
        size=min(26, h * 34), weight="bold", color=style.ink,
        bbox={"boxstyle": "square,pad=0.1", "facecolor": style.color, "edgecolor": "none"})
    fit_text(number, chip * 0.9)
    left, room = x + chip + 0.2, w - chip - 0.3
    two = bool(tile.text) and h > 0.6
    line = axes.text(left, y + h * (0.34 if two else 0.5), f"{status.sign} {tile.status}".strip(),
                     va="center_baseline", size=14, color=status.color, weight="bold")
    fit_text(line, room)
    if tile.text and two:
        _write_value(axes, tile.text, left, y + h * 0.66, room, INK)
    elif tile.text:
        line.set_text(tile.text)
        fit_text(line, room)


def _write_value(axes: Any, text: str, x: float, y: float, room: float, color: str) -> None:
    """Write one line of 14 points if it fits, else two of 11, the end cut off with an ellipsis."""
    drawn = axes.text(x, y, text, va="center", size=14, color=color, linespacing=1.05)
    if len(text) * 14 * 0.62 > room * 72:
        drawn.set_fontsize(11)
        letters = max(4, int(room * 72 / 11 / 0.62))
        lines = textwrap.wrap(text, letters, max_lines=2, placeholder="…")
        drawn.set_text("\n".join(lines) or text[: letters - 1] + "…")
