"""A multilayer perceptron whose parameters are a plain dict: as a parameter server keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn import functional

from dtlab.checks import check_whole, short
from dtlab.errors import ConfigError

Parameters = dict[str, torch.Tensor]


class MLP:
    """Linear layers of these `widths`, two or more, tanh between them; cross-entropy at the end.

    It holds no parameters: `parameters` makes them, everything else is given them.

    >>> model = MLP((64, 32, 10))
    >>> {key: tuple(w.shape) for key, w in model.parameters().items()}
    {'w0': (64, 32), 'b0': (32,), 'w1': (32, 10), 'b1': (10,)}
    """

    def __init__(self, widths: Sequence[int] = (64, 32, 10)):
        if not isinstance(widths, Sequence) or len(widths) < 2:
            raise ConfigError(f"MLP takes two widths or more, such as (64, 32, 10), not "
                              f"{short(widths)}")
        for width in widths:
            check_whole("a width", width)
        self.widths = tuple(widths)

    def parameters(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> Parameters:
        """New parameters: biases 0, weights normal with variance 1 / inputs. Equal for equal seeds,
        up to rounding whatever the dtype."""
        random = torch.Generator().manual_seed(seed)
        made: Parameters = {}
        for layer, (inputs, outputs) in enumerate(pairwise(self.widths)):
            w = torch.randn(inputs, outputs, generator=random, dtype=torch.float64, device="cpu")
            made[f"w{layer}"] = (w / inputs**0.5).to(dtype)
            made[f"b{layer}"] = w.new_zeros(outputs, dtype=dtype)
        return made

    def module(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
        """The same network as a `torch.nn.Module`, which holds its parameters."""
        layers: list[torch.nn.Module] = []
        parameters = self.parameters(seed, dtype)
        for number, (inputs, outputs) in enumerate(pairwise(self.widths)):
            linear = torch.nn.Linear(inputs, outputs, dtype=dtype)
            with torch.no_grad():
                linear.weight.copy_(parameters[f"w{number}"].T)
                linear.bias.copy_(parameters[f"b{number}"])
            layers += [linear, torch.nn.Tanh()]
        return torch.nn.Sequential(*layers[:-1])

    def forward(self, parameters: Parameters, x: torch.Tensor) -> torch.Tensor:
        """x (batch, inputs) → logits (batch, classes)."""
        last = len(self.widths) - 2
        for layer in range(last + 1):
            x = x @ parameters[f"w{layer}"] + parameters[f"b{layer}"]
            x = torch.tanh(x) if layer < last else x
        return x

    def loss(self, parameters: Parameters, x: torch.Tensor, y: torch.Tensor) -> float:
        """The mean cross-entropy of a batch."""
        with torch.no_grad():
            return float(functional.cross_entropy(self.forward(parameters, x), y))

    def gradients(
        self, parameters: Parameters, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[float, Parameters]:
        """(loss, gradients) of the mean cross-entropy of a batch; gradients by the same keys."""
        leaves = {key: w.detach().requires_grad_() for key, w in parameters.items()}
        with torch.enable_grad():
            loss = functional.cross_entropy(self.forward(leaves, x), y)
            slopes = torch.autograd.grad(loss, list(leaves.values()))
        return float(loss.detach()), dict(zip(leaves, slopes, strict=True))

    def accuracy(self, parameters: Parameters, x: torch.Tensor, y: torch.Tensor) -> float:
        """The share of x whose class it names."""
        with torch.no_grad():
            return float((self.forward(parameters, x).argmax(-1) == y).float().mean())
