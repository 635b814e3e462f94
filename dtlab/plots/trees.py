"""The two trees of a double tree: who is inside of one, who of the other."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from dtlab.collectives.all_reduce_trees import Tree
from dtlab.errors import ConfigError
from dtlab.plots.palette import INK, QUIET, rank_style
from dtlab.plots.picture import Picture, page
from dtlab.topology import check_ranks
from dtlab.units import count_text

MOST_RANKS = 32  # more can't be read in one picture
WIDTH_IN, SIDE_IN = 11.0, 0.45


def double_tree(ranks: int) -> Picture:
    """The trees that `all_reduce` "double_tree" sums up and hands out in, one above the other.

    Each rank stands at the same place across in both; the root on top, a line to each child. Ranks
    with children are squares, leaves are discs. At most 32 ranks, else `ConfigError`. Chapter: 05b.
    """
    check_ranks(ranks)
    if ranks > MOST_RANKS:
        raise ConfigError(f"two trees of {ranks} ranks can't be read; "
                          f"take {MOST_RANKS} or fewer")
    trees = {"first half of the vector": Tree(ranks, mirrored=False),
             "second half": Tree(ranks, mirrored=True)}
    title = f"Two trees over {count_text(ranks, 'rank')}"
    note = "square: has children, and adds; disc: a leaf, which doesn't"
    levels = 1 + max(tree.depth(rank) for tree in trees.values() for rank in range(ranks))
    high_in = 0.42 + 0.62 * levels
    with page(WIDTH_IN, 1.0 + 2 * high_in, title, note) as picture:
        for half, (name, tree) in enumerate(trees.items()):
            axes = picture.place(left=SIDE_IN, right=SIDE_IN, top=0.95 + half * high_in,
                              bottom=0.05 + (1 - half) * high_in)
            axes.set_xlim(-0.6, max(ranks - 0.4, 0.6))
            axes.set_ylim(levels - 0.45, -0.85)
            axes.set_axis_off()
            _draw(axes, tree, name)
    inside = [", ".join(str(r) for r in range(ranks) if tree.children(r)) or "nobody"
              for tree in trees.values()]
    picture.alt = (f"{title}. Ranks with children in the tree of the first half: {inside[0]}; in "
                   f"that of the second: {inside[1]}.")
    return picture


def _draw(axes: Axes, tree: Tree, name: str) -> None:
    ranks = range(tree.p)
    places = [(rank, tree.depth(rank)) for rank in ranks]
    lines = [(places[rank], places[child]) for rank in ranks for child in tree.children(rank)]
    axes.add_collection(LineCollection(lines, colors=QUIET, linewidths=2, zorder=1), autolim=False)
    size = min(15.0, 300.0 / tree.p)
    for rank in ranks:
        style = rank_style(rank)
        axes.scatter(*places[rank], s=(size * 1.9) ** 2, zorder=2, color=style.color,
                     marker="s" if tree.children(rank) else "o", edgecolors=INK, linewidths=1.0)
        axes.text(*places[rank], str(rank), ha="center", va="center_baseline", size=size,
                  weight="bold", color=style.ink, zorder=3)
    axes.text(-0.5, -0.6, name, ha="left", va="center", size=13, color=INK)
