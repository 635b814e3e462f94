"""The time of training, and what more devices can do about it."""

from __future__ import annotations

from dtlab.checks import check_each, check_flag, check_number, check_positive, check_whole
from dtlab.errors import ConfigError


def training_time_s(
    parameters: float, tokens: float, devices: int, device_flops: float, efficiency: float = 1.0,
    recompute: bool = False,
) -> float:
    """Seconds to train a transformer of `parameters` on `tokens` tokens: its floating-point
    operations, over those that `devices` of `device_flops` a second each do with `efficiency`.

    A parameter takes 2 operations for each token forward and 4 backward, and 2 more if activations
    are computed again. Attention's scores are not in it. Sources: Kaplan et al. 2020, §2.1;
    with recomputation Narayanan et al. 2021, §5.1.

    >>> round(training_time_s(1008e9, 450e9, 3072, 163e12, recompute=True) / 86400)
    84
    """
    check_each(check_positive, parameters=parameters, tokens=tokens, devices=devices,
               device_flops=device_flops, efficiency=efficiency)
    check_flag("recompute", recompute)
    if efficiency > 1:
        raise ConfigError(f"efficiency is a share of 1, not {efficiency!r}")
    return (8 if recompute else 6) * parameters * tokens / (devices * device_flops * efficiency)


def amdahl_speedup(serial: float, devices: int) -> float:
    """The speedup of a fixed amount of work whose share `serial` can't be divided: 1/(s + (1−s)/n).

    Source: Amdahl 1967.

    >>> round(amdahl_speedup(0.05, 1024), 1)
    19.6
    """
    _check(serial, devices)
    return 1 / (serial + (1 - serial) / devices)


def gustafson_speedup(serial: float, devices: int) -> float:
    """The speedup if the work grows with the devices, so that their time stays, of which the share
    `serial` isn't divided: n − (n−1)·s.

    Source: Gustafson 1988.
    """
    _check(serial, devices)
    return devices - (devices - 1) * serial


def _check(serial: float, devices: int) -> None:
    check_number("serial", serial)
    if not 0 <= serial <= 1:
        raise ConfigError(f"serial must be a share from 0 to 1, not {serial!r}")
    check_whole("devices", devices)
