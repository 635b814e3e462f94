"""Sizes, times and bandwidths, as typed and as read."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from dtlab.errors import ConfigError
from dtlab.units import bandwidth_of, bytes_of, bytes_text, seconds_of, seconds_text, time_unit


@pytest.mark.parametrize(("of", "values"), [
    (bytes_of, {
        "0": 0, "512": 512, "512B": 512, "1kB": 1000, "1KB": 1000, "1KiB": 1024,
        "100MB": 100_000_000, "1.5 MB": 1_500_000, "2GiB": 2**31, "1e3": 1000, "1TB": 10**12}),
    (seconds_of, {
        "5us": 5e-6, "5µs": 5e-6, "1.5ms": 1.5e-3, "3": 3.0, "200ns": 2e-7, "2s": 2.0, "0": 0.0}),
    (bandwidth_of, {  # bits are told from bytes
        "10GB/s": 1e10, "10Gb/s": 1.25e9, "100Gbit/s": 1.25e10, "10Gbps": 1.25e9, "1e9": 1e9,
        "64MiB/s": 2.0**26, "inf": math.inf}),
])
def test_what_people_type_is_read(of: Callable[[str], float], values: dict[str, float]) -> None:
    assert {text: of(text) for text in values} == values


@pytest.mark.parametrize(("of", "what", "texts"), [
    (bytes_of, "size|memory",
     ["", "MB", "10 apples", "1.5B", "-4", "1.2.3", "inf", "4mB", "100Mb", "NaN", "1e308KB"]),
    (seconds_of, "time",
     ["", "fast", "5 minutes", "1.2.3s", "5uss", "nan", "-5us", "inf", "-1"]),
    (bandwidth_of, "bandwidth", ["", "10GB/min", "B/s", "10XB/s", "1..2GB/s", "-1", "-inf"]),
])
def test_what_makes_no_sense_is_refused(of: Callable[[str], float], what: str, texts: list[str]
                                        ) -> None:
    for text in texts:
        with pytest.raises(ConfigError, match=what):
            of(text)


@pytest.mark.parametrize(("text_of", "texts"), [
    (bytes_text, {0: "0 B", 1: "1 B", 999: "999 B", 1000: "1 kB", 94208: "94.2 kB", 5e9: "5 GB",
                  999_999: "1 MB", 3e15: "3,000 TB"}),
    (seconds_text, {0.0: "0 s", 1e-9: "1 ns", 12.5e-6: "12.5 µs", 0.9999e-3: "1 ms", 90.0: "90 s",
                    5000.0: "5,000 s", math.inf: "∞ s"}),
])
def test_numbers_read_well(text_of: Callable[[float], str], texts: dict[float, str]) -> None:
    assert {number: text_of(number) for number in texts} == texts
    assert time_unit(2e-6) == (1e-6, "µs")
