"""The time to train a model, and whether it fits in memory."""

from __future__ import annotations

from functools import partial

from dtlab.models import SHAPES
from dtlab.plots import Picture
from dtlab.plots.training_time import DEVICES, training_time
from dtlab.widgets.explorer import Explorer, choice, dropdown

_MODELS = {**{name: name for name in SHAPES}, "1008 B (Megatron-LM 2021)": 1008e9}
_TOKENS = (10e9, 30e9, 100e9, 300e9, 450e9, 1e12, 3e12, 15e12)


class TrainingTimeExplorer(Explorer):
    """`plots.training_time` with controls. Raises `ConfigError` for what these don't offer."""

    def __init__(self, model: str | float = "GPT-3", tokens: float = 300e9,
                 device: str = "A100 (312 TFLOP/s, 80 GB)", devices: int = 1024,
                 efficiency: float = 0.45, recompute: bool = True):
        counts = sorted({*(2**k for k in range(16)), 384, 3072, devices})
        shares = sorted({k / 100 for k in range(5, 105, 5)} | {0.52, efficiency})
        self.model = dropdown("model", list(_MODELS.items()), model, width="300px")
        self.device = dropdown("device", list(DEVICES), device, width="330px")
        self.recompute = dropdown("activations", [("kept", False), ("computed again", True)],
                                  recompute, width="250px")
        self.tokens = choice("tokens", [(f"{n / 1e9:,.4g} B", n) for n in
                                        sorted({*_TOKENS, tokens})], tokens, width="300px")
        self.devices = choice("devices", [(f"{n:,}", n) for n in counts], devices, width="300px")
        self.efficiency = choice("efficiency", [(f"{e:.0%}", e) for e in shares], efficiency,
                                 width="300px")
        super().__init__([self.model, self.device, self.recompute],
                         [self.tokens, self.devices, self.efficiency])
        self._update()
        for control in self.controls:
            control.observe(lambda _: self._update(), "value")

    def static(self) -> Picture:
        """Return the picture that is shown, as a matplotlib figure."""
        return training_time(*self._choice())

    def _choice(self) -> tuple[str | float, float, str, int, float, bool]:
        return (self.model.value, self.tokens.value, self.device.value, self.devices.value,
                self.efficiency.value, self.recompute.value)

    def _update(self) -> None:
        now = self._choice()
        self._show(now, partial(training_time, *now))
