"""Sizes, times and bandwidths, as typed and as read."""

from __future__ import annotations

import doctest
import math

import pytest

from dtlab import units
from dtlab.errors import ConfigError
from dtlab.units import bandwidth_of, bytes_of, bytes_text, seconds_of, seconds_text, time_unit


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(units).failed == 0
    assert doctest.testmod(units).attempted >= 3


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("512", 512), ("512B", 512), ("1kB", 1000), ("1KB", 1000), ("1KiB", 1024),
     ("100MB", 100_000_000), ("1.5 MB", 1_500_000), ("2GiB", 2**31), ("1e3", 1000),
     ("1TB", 10**12)],
)
def test_sizes(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize(("text", "seconds"),
                         [("5us", 5e-6), ("5µs", 5e-6), ("1.5ms", 1.5e-3), ("3", 3.0),
                          ("200ns", 2e-7), ("2s", 2.0), ("0", 0.0)])
def test_times(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(("text", "rate"),
                         [("10GB/s", 1e10), ("10Gb/s", 1.25e9), ("100Gbit/s", 1.25e10),
                          ("10Gbps", 1.25e9), ("1e9", 1e9), ("64MiB/s", 2.0**26),
                          ("inf", math.inf)])
def test_bandwidths_tell_bits_from_bytes(text: str, rate: float) -> None:
    assert bandwidth_of(text) == rate


@pytest.mark.parametrize("text", ["", "MB", "10 apples", "1.5B", "-4", "1.2.3", "inf", "4mB",
                                  "100Mb", "NaN"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="size"):
        bytes_of(text)


@pytest.mark.parametrize("text", ["", "fast", "5 minutes", "1.2.3s", "5uss", "nan", "-5us", "inf"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="time"):
        seconds_of(text)


@pytest.mark.parametrize("text", ["", "10GB/min", "B/s", "10XB/s", "1..2GB/s", "-1", "-inf"])
def test_what_is_no_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="bandwidth"):
        bandwidth_of(text)


@pytest.mark.parametrize(("bytes_", "text"), [(0, "0 B"), (1, "1 B"), (999, "999 B"),
                                              (1000, "1 kB"), (94208, "94.2 kB"), (5e9, "5 GB"),
                                              (999_999, "1 MB"), (3e15, "3,000 TB")])
def test_sizes_read_well(bytes_: float, text: str) -> None:
    assert bytes_text(bytes_) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0 s"), (1e-9, "1 ns"), (12.5e-6, "12.5 µs"),
                                               (0.9999e-3, "1 ms"), (90.0, "90 s"),
                                               (5000.0, "5,000 s"), (float("inf"), "∞ s")])
def test_times_read_well(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
    assert time_unit(2e-6) == (1e-6, "µs")
