"""The memory of a real model, by ranks, a stage of ZeRO, and a device's memory."""

from __future__ import annotations

from functools import partial

from dtlab.cost.memory import RECOMPUTE
from dtlab.models import SHAPES
from dtlab.plots import Picture
from dtlab.plots.memory import RECIPES, STAGES, model_memory
from dtlab.units import bytes_text
from dtlab.widgets.explorer import Explorer, choice, dropdown

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
        samples = sorted({0, 1, 2, 4, 8, 16, 32, batch})
        devices = sorted({*_DEVICES, device_bytes})
        counts = sorted({*(2**k for k in range(15)), ranks})
        self.model = dropdown("model", [*SHAPES], model)
        self.stage = dropdown("ZeRO", [(name, s) for s, name in STAGES.items()], stage,
                              width="200px")
        self.recipe = dropdown("recipe", [*RECIPES], recipe, width="330px")
        self.recompute = dropdown("recompute", RECOMPUTE, recompute, width="200px")
        self.ranks = choice("ranks", [(f"{n:,}", n) for n in counts], ranks, width="300px")
        self.batch = choice("samples a rank", [(str(n) if n else "none", n)
                                                for n in samples], batch, width="330px")
        self.device = choice("device", [(bytes_text(n), n) for n in devices], device_bytes,
                             width="300px")
        super().__init__([self.model, self.stage, self.recipe, self.recompute],
                         [self.ranks, self.batch, self.device])
        self._update()
        for control in self.controls:
            control.observe(lambda _: self._update(), "value")

    def static(self) -> Picture:
        """Return the picture that is shown, as a matplotlib figure."""
        return model_memory(*self._choice())

    def _choice(self) -> tuple[str, int, int, str, int, str, float]:
        return (self.model.value, self.ranks.value, self.stage.value, self.recipe.value,
                self.batch.value, self.recompute.value, self.device.value)

    def _update(self) -> None:
        now = self._choice()
        self._show(now, partial(model_memory, *now))
        for stage in STAGES:  # what may be asked for next
            near = (*now[:2], stage, *now[3:])
            self._ahead(near, partial(model_memory, *near))
