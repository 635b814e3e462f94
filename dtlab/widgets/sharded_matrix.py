"""A tensor-parallel layer: who holds what, which type it has, and what moves."""

from __future__ import annotations

from functools import partial

from dtlab.plots import Picture
from dtlab.plots.sharded_matrix import LAYERS, sharded_matrix
from dtlab.widgets.explorer import Explorer, choice, dropdown


class ShardedMatrixExplorer(Explorer):
    """`plots.sharded_matrix` with controls. Raises `ConfigError` for what these don't offer."""

    def __init__(self, layer: str = "MLP", ranks: int = 2, backward: bool = False,
                 tokens: int = 2048, hidden: int = 4096):
        self.layer = dropdown("layer", list(LAYERS), layer, width="280px")
        self.direction = dropdown("direction", [("forward", False), ("backward", True)], backward)
        self.ranks = choice("ranks", [(str(t), t) for t in (1, 2, 3, 4)], ranks, width="220px")
        self.tokens = choice("tokens", [(f"{n:,}", n) for n in sorted(
            {512, 1024, 2048, 4096, 8192, tokens})], tokens, width="300px")
        self.hidden = choice("hidden size", [(f"{n:,}", n) for n in sorted(
            {768, 1600, 4096, 8192, 12_288, hidden})], hidden, width="320px")
        super().__init__([self.layer, self.direction, self.ranks], [self.tokens, self.hidden])
        self._update()
        for control in self.controls:
            control.observe(lambda _: self._update(), "value")

    def static(self) -> Picture:
        """Return the picture that is shown, as a matplotlib figure."""
        return sharded_matrix(*self._choice(), room=4)

    def _choice(self) -> tuple[str, int, bool, int, int]:
        return (self.layer.value, self.ranks.value, self.direction.value, self.tokens.value,
                self.hidden.value)

    def _update(self) -> None:
        now = self._choice()
        self._show(now, partial(sharded_matrix, *now, room=4))
