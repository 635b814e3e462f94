"""The memory of a real model, by ranks, a stage of ZeRO, and a device's memory."""

from __future__ import annotations

from collections.abc import Iterator

from dtlab.cost.memory import RECOMPUTE
from dtlab.models import SHAPES
from dtlab.plots.memory import RECIPES, STAGES, model_memory
from dtlab.units import bytes_text
from dtlab.widgets.explorer import Choice, Explorer, dropdown, number_slider

_DEVICES = (16e9, 24e9, 32e9, 40e9, 80e9, 141e9, 192e9)


class MemoryExplorer(Explorer):
    """`plots.model_memory` with controls. Every number of yours becomes a stop of its slider.

    model: one of `dtlab.models.SHAPES`; batch: samples a rank, 0 leaves activations out. Raises
    `ConfigError` for what doesn't exist.
    """

    def __init__(self, model: str = "7.5 B", ranks: int = 64, stage: int = 0,
                 recipe: str = "Adam, bf16 gradients", batch: int = 0, recompute: str = "none",
                 device_bytes: float = 80e9):
        model_memory(model, ranks, stage, recipe, batch, recompute, device_bytes)  # may raise
        self.model = dropdown("model", SHAPES, model)
        self.stage = dropdown("ZeRO", [(name, s) for s, name in STAGES.items()], stage,
                              width="200px")
        self.recipe = dropdown("recipe", RECIPES, recipe, width="330px")
        self.recompute = dropdown("recompute", RECOMPUTE, recompute, width="200px")
        self.ranks = number_slider("ranks", [2**k for k in range(15)], ranks, "{:,}".format,
                                   width="300px")
        self.batch = number_slider("samples a rank", (0, 1, 2, 4, 8, 16, 32), batch,
                                   lambda n: str(n or "none"), width="330px")
        self.device = number_slider("device", _DEVICES, device_bytes, bytes_text, width="300px")
        super().__init__([self.model, self.stage, self.recipe, self.recompute],
                         [self.ranks, self.batch, self.device])

    _draw = staticmethod(model_memory)

    def _choice(self) -> Choice:
        return (self.model.value, self.ranks.value, self.stage.value, self.recipe.value,
                self.batch.value, self.recompute.value, self.device.value)

    def _near(self) -> Iterator[Choice]:
        model, ranks, _, *others = self._choice()
        return ((model, ranks, stage, *others) for stage in STAGES)
