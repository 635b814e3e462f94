"""The time to train a model, and whether it fits in memory."""

from __future__ import annotations

from dtlab.models import SHAPES
from dtlab.plots import Picture
from dtlab.plots.training_time import DEVICES, training_time
from dtlab.widgets.explorer import Explorer, dropdown, number_slider

_MODELS = {**{name: name for name in SHAPES}, "1008 B (Megatron-LM 2021)": 1008e9}
_TOKENS = (10e9, 30e9, 100e9, 300e9, 450e9, 1e12, 3e12, 15e12)

_DEVICES = (*(2**k for k in range(16)), 384, 3072)
_EFFICIENCIES = (*(k / 100 for k in range(5, 105, 5)), 0.52)


class TrainingTimeExplorer(Explorer):
    """`plots.training_time` with controls. Raises `ConfigError` for what these don't offer."""

    def __init__(self, model: str | float = "GPT-3", tokens: float = 300e9,
                 device: str = "A100 (312 TFLOP/s, 80 GB)", devices: int = 1024,
                 efficiency: float = 0.45, recompute: bool = True):
        self.model = dropdown("model", list(_MODELS.items()), model, width="300px")
        self.device = dropdown("device", DEVICES, device, width="330px")
        self.recompute = dropdown("activations", [("kept", False), ("computed again", True)],
                                  recompute, width="250px")
        self.tokens = number_slider("tokens", _TOKENS, tokens, lambda n: f"{n / 1e9:,.4g} B",
                                    width="300px")
        self.devices = number_slider("devices", _DEVICES, devices, "{:,}".format, width="300px")
        self.efficiency = number_slider("efficiency", _EFFICIENCIES, efficiency, "{:.0%}".format,
                                        width="300px")
        super().__init__([self.model, self.device, self.recompute],
                         [self.tokens, self.devices, self.efficiency])

    def _draw(self, model: str | float, device: str, recompute: bool, tokens: float, devices: int,
              efficiency: float) -> Picture:
        return training_time(model, tokens, device, devices, efficiency, recompute)
