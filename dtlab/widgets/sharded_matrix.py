"""A tensor-parallel layer: who holds what, which type it has, and what moves."""

from __future__ import annotations

from dtlab.plots import Picture
from dtlab.plots.sharded_matrix import LAYERS, sharded_matrix
from dtlab.widgets.explorer import Explorer, choice, dropdown, number_slider


class ShardedMatrixExplorer(Explorer):
    """`plots.sharded_matrix` with controls. Raises `ConfigError` for what these don't offer."""

    def __init__(self, layer: str = "MLP", ranks: int = 2, backward: bool = False,
                 tokens: int = 2048, hidden: int = 4096):
        self.layer = dropdown("layer", LAYERS, layer, width="280px")
        self.direction = dropdown("direction", [("forward", False), ("backward", True)], backward)
        self.ranks = choice("ranks", [(str(t), t) for t in (1, 2, 3, 4)], ranks, width="220px")
        self.tokens = number_slider("tokens", (512, 1024, 2048, 4096, 8192), tokens,
                                    "{:,}".format, width="300px")
        self.hidden = number_slider("hidden size", (768, 1600, 4096, 8192, 12_288), hidden,
                                    "{:,}".format, width="320px")
        super().__init__([self.layer, self.direction, self.ranks], [self.tokens, self.hidden])

    def _draw(self, layer: str, backward: bool, ranks: int, tokens: int, hidden: int) -> Picture:
        return sharded_matrix(layer, ranks, backward, tokens, hidden, room=4)
