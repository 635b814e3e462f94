"""What tests share: the browser, and a folder for artifacts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# The machine may be slow or busy: no example fails for the time it took.
settings.register_profile(
    "dtlab", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("dtlab")


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chrome or Chromium. Without one the test is skipped, or fails if it must run."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if found := shutil.which(name):
            return found
    if os.environ.get("DTLAB_REQUIRE_BROWSER") == "1":
        pytest.fail("DTLAB_REQUIRE_BROWSER=1, and there is no chromium: apt install chromium")
    pytest.skip("no chromium: apt install chromium")


@pytest.fixture(scope="session")
def artifacts() -> Path:
    """A folder for what people may want to look at after the tests: screenshots, traces."""
    folder = ROOT / "artifacts"
    folder.mkdir(exist_ok=True)
    return folder
