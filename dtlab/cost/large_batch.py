"""Steps until a loss is reached, by batch: the critical batch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dtlab.checks import check_each, check_positive, short
from dtlab.errors import ConfigError


def steps_to_loss(batch: float, least_steps: float, critical: float) -> float:
    """Steps of size `batch`: S_min·(1 + B_crit/B).

    `least_steps` is S_min, which the largest batch needs; `critical` is B_crit, the batch that
    needs twice as many, and twice the least number of samples, S_min·B_crit.
    Source: McCandlish et al. 2018, §2.3. Chapter: 10b.

    >>> steps_to_loss(64, 30, 16), steps_to_loss(16, 30, 16)
    (37.5, 60.0)
    """
    check_each(check_positive, batch=batch, least_steps=least_steps, critical=critical)
    return least_steps * (1 + critical / batch)


def fit_critical_batch(steps: Mapping[int, float]) -> tuple[float, float]:
    """(S_min, B_crit) of the curve that comes closest to `steps`, batch → steps, by least squares
    of what is off in parts of each.

    Raises `ConfigError` unless there are two batches or more, and larger ones save steps.
    """
    if not isinstance(steps, Mapping):
        raise ConfigError(f"steps is a dict of batch → steps, not {short(steps)}")
    for value in (*steps, *steps.values()):
        check_positive("steps", value)
    batch, counted = np.array(list(steps), float), np.array(list(steps.values()), float)
    rows = np.stack([np.ones_like(batch), 1 / batch], axis=1) / counted[:, None]
    (least, slope), *_ = np.linalg.lstsq(rows, np.ones_like(batch))
    if len(steps) < 2 or least <= 0 or slope <= 1e-9 * least * batch.min():  # 0 but for rounding
        raise ConfigError("steps needs two batches or more, of which larger ones need fewer steps, "
                          f"but never none; these don't fit the curve: {dict(steps)}")
    return float(least), float(slope / least)
