"""A browser and a JupyterLab for the tests in this folder, and no trace of them afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import Lab, running_lab

REQUIRED = os.environ.get("DTLAB_REQUIRE_BROWSER") == "1"
PHOTOGRAPH = os.environ.get("DTLAB_PHOTOGRAPH") == "1"  # run chapters: every screen for people


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """Chromium, driven by playwright, whose event loop must end before other tests need one."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        if REQUIRED:
            raise
        pytest.skip("no playwright: pip install playwright")
    with sync_playwright() as driver:
        chrome = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            yield chrome
        finally:
            chrome.close()


@pytest.fixture(scope="module")
def lab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab over a copy of the notebooks. (After `browser`: without one, none is started.)"""
    with running_lab(tmp_path_factory.mktemp("lab"), outputs=not PHOTOGRAPH) as server:
        yield server


@pytest.fixture(scope="module")
def shots(artifacts: Path) -> Path:
    """Where screenshots go."""
    folder = artifacts / "browser"
    folder.mkdir(exist_ok=True)
    return folder
