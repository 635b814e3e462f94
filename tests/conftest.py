"""What tests share: the browser, a folder for artifacts, a registry that may be written to."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from dtlab import cost
from dtlab.collectives import ALGORITHMS
from dtlab.collectives.registry import IMPLEMENTATIONS
from dtlab.cost.model import FORMS

ROOT = Path(__file__).resolve().parent.parent

# The machine may be slow or busy: no example fails for the time it took. Each run draws others.
for name, examples in (("dtlab", 25), ("thorough", 1000)):
    settings.register_profile(name, deadline=None, max_examples=examples, suppress_health_check=[
        HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
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


@pytest.fixture
def registering() -> Iterator[None]:
    """Algorithms and closed forms that the test registers are gone with it."""
    books = [FORMS, *IMPLEMENTATIONS.values(), *ALGORITHMS.values()]
    kept = [dict(book) for book in books]
    yield
    for book, entries in zip(books, kept, strict=True):
        book.clear()
        book.update(entries)
    cost.forget()


def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores, as many tests wait: for browsers, hosts, ends."""
    return (os.cpu_count() or 1) + 1


def pytest_configure() -> None:
    """Ctrl-C ends what tests start, also if a shell that ignores it has started the tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Ten thousand tests are not garbage, however often Python's collector looks at them: each full
    collection would take seconds."""
    gc.collect()
    gc.freeze()
