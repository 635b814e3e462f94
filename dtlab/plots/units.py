"""Numbers as people read them: 12.5 µs, 64 kB, 1,024. Decimal prefixes, as networks use them."""

from __future__ import annotations

import math

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def time_unit(seconds: float) -> tuple[float, str]:
    """(scale, name) of the unit in which `seconds` reads best: its value is seconds / scale.

    >>> time_unit(0.002)
    (0.001, 'ms')
    """
    for scale, name in _TIMES:
        if abs(seconds) >= scale * 0.9995:
            return scale, name
    return (1.0, "s") if seconds == 0 else _TIMES[-1]


def seconds_text(seconds: float) -> str:
    """A time with its unit, three digits: "12.5 µs"."""
    if not math.isfinite(seconds):
        return "∞ s" if seconds > 0 else "? s"
    scale, name = time_unit(seconds)
    return f"{_three_digits(seconds / scale)} {name}"


def bytes_text(nbytes: float) -> str:
    """A size with its unit, three digits: "64 kB"."""
    for scale, name in _SIZES:
        if abs(nbytes) >= scale * 0.9995:
            return f"{_three_digits(nbytes / scale)} {name}"
    return f"{_three_digits(nbytes)} B"


def count_text(count: int, one: str, many: str = "") -> str:
    """A count with its noun: "1 message", "5,760 messages"."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _three_digits(value: float) -> str:
    if 999.5 <= abs(value) < 1e5:
        return f"{value:,.0f}"
    return f"{value:.3g}"
