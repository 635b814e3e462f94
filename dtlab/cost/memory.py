"""What the state of a model occupies: parameters, gradients and the optimizer's numbers."""

from __future__ import annotations

from dtlab.errors import ConfigError


def model_state_bytes(
    parameters: float, ranks: int = 1, stage: int = 0, parameter_bytes: float = 2,
    gradient_bytes: float = 2, optimizer_bytes: float = 12,
) -> float:
    """Bytes a rank for the state of `parameters` parameters on `ranks` ranks of data parallelism.

    stage: of ZeRO, which shards the optimizer's state (1), gradients as well (2), parameters as
    well (3); 0: everything is everywhere. The defaults are those of mixed precision with Adam:
    bf16 parameters and gradients, float32 parameters, mean and variance. Activations are not in it,
    nor what pads parameters to a multiple of `ranks`.
    Source: Rajbhandari et al. 2020, §5, figure 1.

    >>> [round(model_state_bytes(7.5e9, 64, stage) / 1e9, 1) for stage in range(4)]
    [120.0, 31.4, 16.6, 1.9]
    """
    for name, value, least in (("parameters", parameters, 0), ("ranks", ranks, 1)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
            raise ConfigError(f"model_state_bytes: {name} must be a number of at least {least}, "
                              f"not {value!r}")
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"ZeRO has the stages 1, 2 and 3 (0: none), not {stage!r}")
    shared = ((optimizer_bytes, 1), (gradient_bytes, 2), (parameter_bytes, 3))
    return sum(parameters * size / (ranks if stage >= first else 1) for size, first in shared)
