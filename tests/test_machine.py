"""What a machine costs is kept, read again, and never believed when it is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

import dtlab
from dtlab import machine
from dtlab.cli import doctor
from dtlab.machine import TYPICAL, Machine


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DTLAB_CACHE", str(tmp_path / "deep"))
    machine.load.cache_clear()
    yield machine.cache_file()
    machine.load.cache_clear()


def test_what_was_never_measured_is_typical_and_what_is_saved_is_loaded(cache: Path) -> None:
    assert machine.load() == TYPICAL
    mine = Machine(1e-5, 2e-9, 3e-10, 4, "2030-01-01T00:00:00+00:00", "here")
    assert machine.save(mine) == cache
    assert machine.load() == mine
    endless = mine._replace(lanes=float("inf"))
    machine.save(endless)
    assert machine.load() == endless
    other = mine._replace(overhead=2e-5)
    machine.save(other)
    assert machine.load() == other


def test_a_file_from_before_overheads_were_measured_is_good(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text('{"alpha": 1e-5, "beta": 2e-9, "gamma": 3e-10, "lanes": 4}')
    assert machine.load() == Machine(1e-5, 2e-9, 3e-10, 4)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"alpha": 1}', '{"foreign": 1}',
                                  '{"alpha": -1, "beta": 1, "gamma": 1}',
                                  '{"alpha": 1, "beta": 1, "gamma": 1, "overhead": -1}',
                                  '{"alpha": NaN, "beta": 1, "gamma": 1}',
                                  '{"alpha": "x", "beta": 1, "gamma": 1}'])
def test_a_broken_file_is_as_good_as_none(cache: Path, text: str) -> None:
    cache.parent.mkdir()
    cache.write_text(text)
    assert machine.load() == TYPICAL


def test_a_folder_for_figures_that_cannot_be_had_is_named(cache: Path) -> None:
    cache.parent.write_text("no folder")
    with pytest.raises(dtlab.ConfigError, match=f"can't be kept: .*{cache.parent}.*DTLAB_CACHE"):
        machine.save(TYPICAL)


def test_the_folder_for_figures_can_be_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.parent == tmp_path / "deep"
    monkeypatch.setenv("DTLAB_CACHE", "")
    assert "dtlab" in machine.cache_file().parts[-2]


def test_calibrate_measures_and_keeps(cache: Path) -> None:
    found = dtlab.calibrate(repeats=2)
    assert machine.load() == found
    assert found.host
    assert found.date
    assert 0 <= found.alpha < 1
    assert 0 < found.gamma < 1e-6
    assert 0 <= found.overhead < 1
    assert found.lanes >= 1


def test_the_doctor_says_what_was_not_measured_yet(cache: Path) -> None:
    assert doctor.calibrated().state == "note"
    machine.save(Machine(1e-5, 2e-9, 3e-10, 4, "2030-01-01", "here"))
    finding = doctor.calibrated()
    assert (finding.state, "before o was measured" in finding.detail) == ("note", True)
    assert "calibrate()" in finding.remedy
    machine.save(Machine(1e-5, 2e-9, 3e-10, 4, "2030-01-01", "here", 2e-6))
    finding = doctor.calibrated()
    assert (finding.state, "o = 2 µs" in finding.detail) == ("ok", True)
