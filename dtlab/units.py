"""Sizes, times and bandwidths as people type them (100MB, 5us, 25Gb/s) and read them (12.5 µs).

k, M, G, T are powers of 1000; Ki, Mi, Gi, Ti of 1024. B is bytes and b is bits, so 25Gb/s is
3.125GB/s: networks are sold in bits, memory in bytes. Pictures and tables use powers of 1000.
"""

from __future__ import annotations

import math
import re

from dtlab.errors import ConfigError

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
             "Ki": 2.0**10, "ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_PER_SECOND = {"s": 1.0, "": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "μs": 1e6, "ns": 1e9}
_NUMBER = r"\s*([-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|inf))\s*"
_NAMES = {"B": 1.0, "": 1.0, "b": 1 / 8, "bit": 1 / 8}
MOST_LETTERS = 100
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def _parsed(pattern: str, text: str) -> re.Match[str] | None:
    short = isinstance(text, str) and len(text) <= MOST_LETTERS  # else it takes time without end
    return re.fullmatch(pattern, text) if short else None


def bytes_of(text: str) -> int:
    """A size in bytes.

    >>> bytes_of("64KiB"), bytes_of("64kB"), bytes_of("1.5M")
    (65536, 64000, 1500000)
    """
    found = _parsed(_NUMBER + r"([kKMGT]?i?)(B?)", text)
    if not found or found[2] not in _PREFIXES or not math.isfinite(float(found[1])):
        raise ConfigError(f"{text!r:.60} is not a size; write bytes like 4096, 100MB or 64KiB")
    size = float(found[1]) * _PREFIXES[found[2]]
    if size >= 2**63:
        raise ConfigError(f"{text!r} is more than any memory holds")
    if size < 0 or size != int(size):
        raise ConfigError(f"{text!r} is {size:g} bytes; a size is a whole number, 0 or more")
    return int(size)


def seconds_of(text: str) -> float:
    """A time in seconds.

    >>> seconds_of("5us"), seconds_of("0.25")
    (5e-06, 0.25)
    """
    found = _parsed(_NUMBER + r"([munµμ]?s?)", text)
    if not found or found[2] not in _PER_SECOND:
        raise ConfigError(f"{text!r:.60} is not a time; write it like 5us, 0.3ms or 2s")
    seconds = float(found[1]) / _PER_SECOND[found[2]]
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{text!r} is not a time; a time is 0 or more, and finite")
    return seconds


def bandwidth_of(text: str) -> float:
    """A bandwidth in bytes per second; "inf" for a link that is never the bottleneck.

    >>> bandwidth_of("10GB/s"), bandwidth_of("25Gb/s"), bandwidth_of("100Gbit/s")
    (10000000000.0, 3125000000.0, 12500000000.0)
    """
    found = _parsed(_NUMBER + r"([kKMGT]?i?)(B|bit|b|)(?:/s|ps)?", text)
    if not found or found[2] not in _PREFIXES:
        raise ConfigError(
            f"{text!r:.60} is not a bandwidth; write it like 10GB/s (bytes) or 100Gb/s (bits)"
        )
    rate_Bps = float(found[1]) * _PREFIXES[found[2]] * _NAMES[found[3]]
    if rate_Bps < 0:
        raise ConfigError(f"{text!r} is not a bandwidth; a bandwidth is 0 or more")
    return rate_Bps


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
